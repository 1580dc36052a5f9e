//! Wraps the functions under test, unchanged, behind small numbers.
//!
//! States, events, actions and records of the engine are numbered as they appear, so that a state
//! of the explorer is a few bytes. The functions' answers are cached. Reasons, which are for
//! people, are left out: nothing depends on them.

use crate::small::{Quick, Small};
use crate::variant::Variant;
use longhaul_engine::handover::{
    DestinationAction, DestinationEvent, DestinationState, Record, SourceAction, SourceEvent,
    SourceState, Terms, step_destination, step_source,
};
use std::collections::HashMap;
use std::hash::Hash;

/// Values by their numbers, from 1.
#[derive(Debug)]
struct Numbers<T> {
    values: Vec<T>,
    numbers: HashMap<T, u8, Quick>,
}

impl<T: Clone + Eq + Hash> Numbers<T> {
    fn new() -> Self {
        Self {
            values: Vec::new(),
            numbers: HashMap::default(),
        }
    }

    fn number(&mut self, value: T) -> u8 {
        if let Some(number) = self.numbers.get(&value) {
            return *number;
        }
        self.values.push(value.clone());
        // 255 exceeds everything that the engine can produce in two attempts; see `fits`.
        let number = u8::try_from(self.values.len()).unwrap_or(u8::MAX);
        self.numbers.insert(value, number);
        number
    }

    fn value(&self, number: u8) -> &T {
        &self.values[usize::from(number) - 1]
    }
}

/// A transition: the next state, and the actions.
pub(crate) type Answer = (u8, Small<6>);

/// One side of the handover: the types and functions of the engine that belong together.
pub(crate) trait SideOf {
    type State: Clone + Eq + Hash;
    type Event: Clone + Eq + Hash;
    type Action: Clone + Eq + Hash;

    fn step(
        variant: Variant,
        state: &Self::State,
        event: &Self::Event,
        terms: &Terms,
    ) -> (Self::State, Vec<Self::Action>);
    fn restore(
        variant: Variant,
        records: &[Record],
        terms: &Terms,
    ) -> (Self::State, Vec<Self::Action>);
    fn plain_state(state: Self::State) -> Self::State;
    fn plain_event(event: Self::Event) -> Self::Event;
    fn plain_action(action: Self::Action) -> Self::Action;
}

/// The numbered functions of one side.
#[derive(Debug)]
pub(crate) struct Functions<S: SideOf> {
    variant: Variant,
    states: Numbers<S::State>,
    events: Numbers<S::Event>,
    actions: Numbers<S::Action>,
    answers: HashMap<(u8, u8, Key), Answer, Quick>,
    /// Whether every answer fitted.
    pub(crate) fits: bool,
}

/// The inputs of an answer besides state and event.
type Key = (u32, u64, bool, bool);

fn key(terms: &Terms) -> Key {
    (
        terms.attempt.0,
        terms.generation.0,
        terms.early,
        terms.arbiter.is_some(),
    )
}

impl<S: SideOf> Functions<S> {
    pub(crate) fn new(variant: Variant) -> Self {
        Self {
            variant,
            states: Numbers::new(),
            events: Numbers::new(),
            actions: Numbers::new(),
            answers: HashMap::default(),
            fits: true,
        }
    }

    pub(crate) fn state(&self, number: u8) -> &S::State {
        self.states.value(number)
    }

    pub(crate) fn state_number(&mut self, state: S::State) -> u8 {
        self.states.number(S::plain_state(state))
    }

    pub(crate) fn event(&self, number: u8) -> &S::Event {
        self.events.value(number)
    }

    pub(crate) fn event_number(&mut self, event: S::Event) -> u8 {
        self.events.number(S::plain_event(event))
    }

    pub(crate) fn action(&self, number: u8) -> &S::Action {
        self.actions.value(number)
    }

    pub(crate) fn action_number(&mut self, action: S::Action) -> u8 {
        self.actions.number(S::plain_action(action))
    }

    /// Returns the engine's answer.
    pub(crate) fn step(&mut self, state: u8, event: u8, terms: &Terms) -> Answer {
        let question = (state, event, key(terms));
        if let Some(answer) = self.answers.get(&question) {
            return *answer;
        }
        let (next, actions) = S::step(
            self.variant,
            self.states.value(state),
            self.events.value(event),
            terms,
        );
        let answer = self.answer(next, actions);
        self.answers.insert(question, answer);
        answer
    }

    /// Returns the engine's state after a restart.
    pub(crate) fn restore(&mut self, records: &[Record], terms: &Terms) -> Answer {
        let (state, actions) = S::restore(self.variant, records, terms);
        self.answer(state, actions)
    }

    fn answer(&mut self, state: S::State, actions: Vec<S::Action>) -> Answer {
        let mut numbers = Small::default();
        for action in actions {
            let number = self.action_number(action);
            self.fits &= numbers.push(number);
        }
        let state = self.state_number(state);
        let most = [
            self.states.values.len(),
            self.events.values.len(),
            self.actions.values.len(),
        ];
        self.fits &= most.iter().all(|count| *count < usize::from(u8::MAX));
        (state, numbers)
    }
}

/// The records of the journals, by number.
#[derive(Debug)]
pub(crate) struct Records(Numbers<Record>);

impl Records {
    pub(crate) fn new() -> Self {
        Self(Numbers::new())
    }

    pub(crate) fn number(&mut self, record: Record) -> u8 {
        self.0.number(plain_record(record))
    }

    pub(crate) fn record(&self, number: u8) -> &Record {
        self.0.value(number)
    }
}

fn plain_record(record: Record) -> Record {
    match record {
        Record::Aborted { attempt, .. } => Record::Aborted {
            attempt,
            reason: String::new(),
        },
        Record::Returned { attempt, .. } => Record::Returned {
            attempt,
            reason: String::new(),
        },
        Record::Overruled {
            attempt,
            run_on,
            generation,
            ..
        } => Record::Overruled {
            attempt,
            run_on,
            generation,
            because: String::new(),
        },
        Record::GaveUp { attempt, .. } => Record::GaveUp {
            attempt,
            because: String::new(),
        },
        other => other,
    }
}

/// The source's side.
#[derive(Debug)]
pub(crate) struct OfSource;

impl SideOf for OfSource {
    type State = SourceState;
    type Event = SourceEvent;
    type Action = SourceAction;

    fn step(
        variant: Variant,
        state: &SourceState,
        event: &SourceEvent,
        terms: &Terms,
    ) -> (SourceState, Vec<SourceAction>) {
        variant
            .source(state, event, terms)
            .unwrap_or_else(|| step_source(state, event, terms))
    }

    fn restore(
        variant: Variant,
        records: &[Record],
        terms: &Terms,
    ) -> (SourceState, Vec<SourceAction>) {
        variant.restored_source(SourceState::restore(records, terms))
    }

    fn plain_state(state: SourceState) -> SourceState {
        state
    }

    fn plain_event(event: SourceEvent) -> SourceEvent {
        use SourceEvent as On;
        match event {
            On::Abort(_) => On::Abort(String::new()),
            On::Overrule(_) => On::Overrule(String::new()),
            On::Written(record) => On::Written(plain_record(record)),
            On::WriteFailed(record) => On::WriteFailed(plain_record(record)),
            other => other,
        }
    }

    fn plain_action(action: SourceAction) -> SourceAction {
        match action {
            SourceAction::Write(record) => SourceAction::Write(plain_record(record)),
            SourceAction::SendCancel(_) => SourceAction::SendCancel(String::new()),
            other => other,
        }
    }
}

/// The destination's side.
#[derive(Debug)]
pub(crate) struct OfDestination;

impl SideOf for OfDestination {
    type State = DestinationState;
    type Event = DestinationEvent;
    type Action = DestinationAction;

    fn step(
        variant: Variant,
        state: &DestinationState,
        event: &DestinationEvent,
        terms: &Terms,
    ) -> (DestinationState, Vec<DestinationAction>) {
        variant
            .destination(state, event, terms)
            .unwrap_or_else(|| step_destination(state, event, terms))
    }

    fn restore(
        variant: Variant,
        records: &[Record],
        terms: &Terms,
    ) -> (DestinationState, Vec<DestinationAction>) {
        variant.restored_destination(DestinationState::restore(records, terms))
    }

    fn plain_state(state: DestinationState) -> DestinationState {
        use DestinationState as Is;
        let reason = String::new();
        match state {
            Is::Aborting { .. } => Is::Aborting { reason },
            Is::Returning { .. } => Is::Returning { reason },
            Is::GivingBack { .. } => Is::GivingBack { reason },
            other => other,
        }
    }

    fn plain_event(event: DestinationEvent) -> DestinationEvent {
        use DestinationEvent as On;
        match event {
            On::Abort(_) => On::Abort(String::new()),
            On::Overrule(_) => On::Overrule(String::new()),
            On::GiveUp(_) => On::GiveUp(String::new()),
            On::ResumeFailed(_) => On::ResumeFailed(String::new()),
            On::Written(record) => On::Written(plain_record(record)),
            On::WriteFailed(record) => On::WriteFailed(plain_record(record)),
            other => other,
        }
    }

    fn plain_action(action: DestinationAction) -> DestinationAction {
        match action {
            DestinationAction::Write(record) => DestinationAction::Write(plain_record(record)),
            other => other,
        }
    }
}
