//! Wraps the functions under test with an agent each, at the level of single actions.
//!
//! This module has the agent's own behaviour: how it feeds the functions, how it keeps records that
//! could not be written, and its actions after a restart. `lib.rs` has the list of these rules.

use crate::functions::{Functions, OfDestination, OfSource, Records};
use crate::outcome::{Outcome, Outcomes};
use crate::small::{Quick, Small};
use crate::step::Ending;
use crate::variant::Variant;
use crate::world::{
    Attempt, DESTINATION, Holder, Message, Preparing, Property, Qemu, SOURCE, Side, Snapshot, World,
};
use longhaul_engine::handover::{
    self, DestinationEvent, DestinationState, Record, SourceEvent, SourceState, Terms,
};
use longhaul_protocol::{Generation, HostId, Incarnation, MigrationId, StoreId};
use std::collections::HashMap;

/// The parameters of a run of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The source releases when the guest stops.
    pub early: bool,
    /// The owner has paused the guest.
    pub paused: bool,
    /// The maximum number of attempts, one after the other.
    pub attempts: usize,
    /// The maximum number of messages on their way at a time: with one more, one of them is lost.
    pub messages: u32,
    /// The source stops the guest only when its offer was accepted, and asks only when none of its
    /// messages is on its way; immediate actions of an agent are not interleaved with events
    /// elsewhere, only with its death. This reduces the number of states.
    pub orderly: bool,
    /// What is missing at the destination when the guest runs there: only the source has it.
    pub left: Left,
    /// There is an arbiter.
    pub arbiter: bool,
    /// Whether doubt must end, too.
    pub doubt: bool,
    /// The deliberate fault.
    pub variant: Variant,
}

/// What is missing at the destination when the guest runs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Nothing.
    Nothing,
    /// Blocks of disks.
    Disks,
    /// Pages of memory.
    Memory {
        /// The source copies them to a memory file.
        keeps: bool,
    },
}

impl Setting {
    /// Returns whether something is missing at the destination when the guest runs there.
    pub(crate) fn drains(&self) -> bool {
        self.left != Left::Nothing
    }

    /// Returns whether memory is.
    pub(crate) fn follows(&self) -> bool {
        matches!(self.left, Left::Memory { .. })
    }
}

/// The arbiter's store.
pub(crate) const STORE: StoreId = StoreId([0; 16]);

/// The functions of both sides, and their inputs.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) setting: Setting,
    pub(crate) source: Functions<OfSource>,
    pub(crate) destination: Functions<OfDestination>,
    pub(crate) records: Records,
    pub(crate) seen: Outcomes,
    claims: HashMap<(usize, u8, usize, Small<8>, u8), bool, Quick>,
}

impl Machine {
    pub(crate) fn new(setting: Setting) -> Self {
        Self {
            setting,
            source: Functions::new(setting.variant),
            destination: Functions::new(setting.variant),
            records: Records::new(),
            seen: Outcomes::default(),
            claims: HashMap::default(),
        }
    }

    pub(crate) fn terms(&self, index: usize, attempt: &Attempt) -> Terms {
        Terms {
            attempt: longhaul_protocol::Attempt(index as u32 + 1),
            generation: Generation(u64::from(attempt.generation)),
            early: self.setting.early,
            arbiter: attempt.arbitrated.then_some(STORE),
        }
    }

    fn began(&self, index: usize, attempt: &Attempt, side: handover::Side) -> Record {
        let terms = self.terms(index, attempt);
        Record::Began {
            migration: MigrationId([0; 8]),
            attempt: terms.attempt,
            side,
            guest: String::new(),
            generation: terms.generation,
            peer: HostId([attempt.offered_to[1]; 32]),
            peer_name: String::new(),
            paused: self.setting.paused,
        }
    }

    pub(crate) fn source_state(&self, side: &Side) -> Option<&SourceState> {
        (side.state != 0).then(|| self.source.state(side.state))
    }

    pub(crate) fn destination_state(&self, side: &Side) -> Option<&DestinationState> {
        (side.state != 0).then(|| self.destination.state(side.state))
    }

    /// Returns the side that acts next, where an order is kept: attempt, side, host.
    pub(crate) fn busy_side(&self, world: &World) -> Option<(usize, usize, usize)> {
        if !self.setting.orderly {
            return None;
        }
        let sides = (0..world.begun()).flat_map(|index| [(index, SOURCE), (index, DESTINATION)]);
        let mut busy = sides.filter(|(index, side)| {
            let attempt = &world.attempts[*index];
            let prepares = *side == SOURCE && attempt.preparing != Preparing::Done;
            prepares || !attempt.sides[*side].todo.is_empty()
        });
        let (index, side) = busy.next()?;
        Some((index, side, world.attempts[index].host(side)))
    }

    // How an attempt begins.

    pub(crate) fn begin(&mut self, world: &mut World, index: usize, host: usize, arbitrated: bool) {
        let other = &world.hosts[host ^ 1];
        world.attempts[index] = Attempt {
            begun: true,
            preparing: Preparing::Begins,
            offered_to: [other.lives, other.identity],
            arbitrated,
            from: host as u8,
            generation: world.hosts[host].generation,
            ..Attempt::default()
        };
        if self.setting.variant == Variant::OfferBeforeBegan {
            send(world, index, Message::Offer);
        }
        if index > 0 && world.attempts[index - 1].from != world.attempts[index].from {
            self.seen.add(Outcome::WentBack);
        }
    }

    /// Writes the next record of an attempt that is yet to be offered, then offers it. An attempt
    /// whose records cannot be written ends, and its journal is removed. If that fails too, it
    /// stays until the next start, and the guest's name is free.
    pub(crate) fn prepare(
        &mut self,
        world: &mut World,
        index: usize,
        ending: Ending,
    ) -> Option<()> {
        let attempt = world.attempts[index];
        let record = match attempt.preparing {
            Preparing::Done => return None,
            Preparing::Begins => self.began(index, &attempt, handover::Side::Source),
            Preparing::Names => Record::Peer {
                attempt: self.terms(index, &attempt).attempt,
                incarnation: Incarnation([attempt.offered_to[0]; 16]),
            },
        };
        if !world.hosts[attempt.host(SOURCE)].up {
            return None;
        }
        let number = self.records.number(record);
        let side = &mut world.attempts[index].sides[SOURCE];
        match ending {
            Ending::Well => {
                let named = attempt.preparing == Preparing::Names;
                // A destination of an older version names no incarnation.
                let unnamed = matches!(
                    self.setting.variant,
                    Variant::PeerUnwritten | Variant::OtherIdentity
                );
                let omitted = named && unnamed;
                let fits = omitted || side.journal.push(number);
                if !fits {
                    world.blame(Property::Capacity);
                }
                if named {
                    self.offer(world, index);
                } else {
                    world.attempts[index].preparing = Preparing::Names;
                }
                return Some(());
            }
            Ending::FailedLost => {
                *side = Side {
                    ended: Some(true),
                    ..Side::default()
                };
            }
            Ending::FailedDurable => side.tail = number,
            Ending::FailedKept if !side.journal.is_empty() => {}
            Ending::FailedKept | Ending::Refused | Ending::Died => return None,
        }
        self.seen.add(Outcome::NeverOffered);
        world.attempts[index].preparing = Preparing::Done;
        world.budget.failed_writes = world.budget.failed_writes.checked_sub(1)?;
        Some(())
    }

    fn offer(&mut self, world: &mut World, index: usize) {
        let attempt = &mut world.attempts[index];
        attempt.preparing = Preparing::Done;
        let side = &mut attempt.sides[SOURCE];
        side.session = true;
        side.state = self
            .source
            .state_number(SourceState::Here { postmigrate: false });
        if self.setting.variant != Variant::OfferBeforeBegan {
            send(world, index, Message::Offer);
        }
    }

    /// Handles an offer at the destination.
    pub(crate) fn accept(&mut self, world: &mut World, index: usize) {
        let attempt = &mut world.attempts[index];
        let side = &mut attempt.sides[DESTINATION];
        side.session = true;
        side.state = self.destination.state_number(DestinationState::Unknown);
        let began = self.began(index, &world.attempts[index], handover::Side::Destination);
        self.feed_destination(world, index, DestinationEvent::Offered(began));
    }

    /// Returns whether a guest's name is taken at a host by another attempt.
    pub(crate) fn is_busy(&self, world: &World, host: usize, but: Option<usize>) -> bool {
        let others = world.attempts.iter().enumerate();
        let mut others = others.filter(|(index, attempt)| attempt.begun && Some(*index) != but);
        others.any(|(_, attempt)| {
            let side = host ^ usize::from(attempt.from);
            let state = &attempt.sides[side];
            if side == SOURCE {
                if attempt.preparing != Preparing::Done {
                    return true;
                }
                // A guest that an operator gave back is its owner's, whenever the destination
                // learns it.
                return self
                    .source_state(state)
                    .is_some_and(|state| !state.is_over() && *state != SourceState::Overruled);
            }
            match self.destination_state(state) {
                None | Some(DestinationState::Unknown) => false,
                Some(state) => !state.is_settled() || self.fetches(state),
            }
        })
    }

    /// Returns whether the guest runs at the destination, which fetches what is missing.
    pub(crate) fn fetches(&self, state: &DestinationState) -> bool {
        self.setting.drains() && *state == (DestinationState::Running { all_present: false })
    }

    // Feeding.

    pub(crate) fn feed_source(&mut self, world: &mut World, index: usize, event: SourceEvent) {
        let number = self.source.event_number(event);
        self.feed(world, index, SOURCE, number);
        self.go_on(world, index, SOURCE);
    }

    pub(crate) fn feed_destination(
        &mut self,
        world: &mut World,
        index: usize,
        event: DestinationEvent,
    ) {
        let number = self.destination.event_number(event);
        self.feed(world, index, DESTINATION, number);
        self.go_on(world, index, DESTINATION);
    }

    fn feed(&mut self, world: &mut World, index: usize, side: usize, event: u8) {
        let terms = self.terms(index, &world.attempts[index]);
        let before = world.attempts[index].sides[side].state;
        let ((state, todo), again) = if side == SOURCE {
            self.see_source(before, event);
            let again = matches!(self.source.event(event), SourceEvent::WriteFailed(_));
            (self.source.step(before, event, &terms), again)
        } else {
            self.see_destination(before, event);
            let again = matches!(
                self.destination.event(event),
                DestinationEvent::WriteFailed(_)
            );
            (self.destination.step(before, event, &terms), again)
        };
        if side == SOURCE && before != state && *self.source.state(state) == SourceState::Done {
            // An operator whose statement could not be recorded is asked again, and binds nobody.
            world.attempts[index].overruled[SOURCE] = false;
        }
        let it = &mut world.attempts[index].sides[side];
        (it.state, it.todo, it.again) = (state, todo, again);
        if side == DESTINATION && before != state {
            self.launch(world, index, state);
        }
    }

    /// Starts QEMU after BEGAN is on disk.
    fn launch(&self, world: &mut World, index: usize, state: u8) {
        let host = world.attempts[index].host(DESTINATION);
        let host = &mut world.hosts[host];
        let receives = matches!(
            self.destination.state(state),
            DestinationState::Receiving { commit: None }
        );
        if receives && !host.qemu.is_there() {
            host.qemu = Qemu::Incoming;
            host.copy = index as u8 + 1;
        }
    }

    /// Feeds the results of the actions when all are done; ends a finished side.
    pub(crate) fn go_on(&mut self, world: &mut World, index: usize, side: usize) {
        loop {
            let it = &mut world.attempts[index].sides[side];
            if !it.todo.is_empty() {
                return;
            }
            it.again = false;
            let heard = |it: &mut Side| Some(std::mem::take(&mut it.heard)).filter(|it| *it != 0);
            let event = it.events.pop_front().or_else(|| heard(it));
            let Some(event) = event.or_else(|| self.present(world, index, side)) else {
                break;
            };
            self.feed(world, index, side, event);
        }
        if side == DESTINATION {
            self.leave(world, index);
        }
    }

    /// Reports at once that nothing is needed any more, for a destination without a task.
    fn present(&mut self, world: &World, index: usize, side: usize) -> Option<u8> {
        let it = &world.attempts[index].sides[side];
        if side == SOURCE || it.session || it.unwritten != 0 || self.setting.drains() {
            return None;
        }
        let running = DestinationState::Running { all_present: false };
        (*self.destination_state(it)? == running)
            .then(|| self.destination.event_number(DestinationEvent::AllPresent))
    }

    /// Removes a destination's journal at its end. Without a task the destination forgets settled
    /// attempts, and reads the journal again when asked.
    fn leave(&mut self, world: &mut World, index: usize) {
        let it = &mut world.attempts[index].sides[DESTINATION];
        let Some(state) = (it.state != 0).then(|| self.destination.state(it.state)) else {
            return;
        };
        let running = DestinationState::Running { all_present: false };
        match state {
            DestinationState::Closed { here } if it.unwritten == 0 => {
                let ended = *here;
                self.remove(world, index, DESTINATION, ended);
            }
            // Nothing was recorded, so nothing is remembered.
            DestinationState::Unknown if it.journal.is_empty() && it.tail == 0 => {
                *it = Side {
                    ended: it.ended,
                    ..Side::default()
                };
            }
            state if self.setting.drains() && *state == running => {}
            state if state.is_settled() && !it.session => {
                *it = Side {
                    journal: it.journal,
                    tail: it.tail,
                    ended: it.ended,
                    ..Side::default()
                };
            }
            _ => {}
        }
    }

    /// Removes a finished journal.
    pub(crate) fn remove(&mut self, world: &mut World, index: usize, side: usize, here: bool) {
        let attempt = &mut world.attempts[index];
        let ended = attempt.sides[side].ended.unwrap_or(here);
        attempt.sides[side] = Side {
            ended: Some(ended),
            ..Side::default()
        };
        let sides = world.attempts[index].sides;
        if sides[SOURCE].ended == Some(false) && sides[DESTINATION].ended == Some(true) {
            self.seen.add(Outcome::Committed);
        }
    }

    // Crashes.

    pub(crate) fn crash(&mut self, world: &mut World, host: usize) {
        world.hosts[host].up = false;
        let attempts = world.attempts.iter_mut().enumerate();
        for (index, attempt) in attempts.filter(|(_, attempt)| attempt.begun) {
            let here = host ^ usize::from(attempt.from);
            if here == SOURCE {
                attempt.preparing = Preparing::Done;
            }
            let side = &mut attempt.sides[here];
            if here == DESTINATION && side.ended.is_some() {
                // The knowledge that the attempt is closed is gone, and the connection of its offer
                // with it.
                world.net &= !(1 << Message::Offer.bit(index));
            }
            // What the source has said is said again.
            attempt.following.lost &= here != DESTINATION;
            *side = Side {
                journal: side.journal,
                tail: side.tail,
                ended: side.ended,
                ..Side::default()
            };
        }
    }

    pub(crate) fn restart(&mut self, world: &mut World, host: usize) {
        world.hosts[host].up = true;
        for index in 0..world.begun() {
            let side = host ^ usize::from(world.attempts[index].from);
            let went_on = self.went_on(world, index, host);
            let is_away = side == SOURCE && self.is_away(world, index, host);
            if side == SOURCE {
                self.sweep_file(world, index);
            }
            self.take_up(world, index, side);
            self.leave_guest(world, index, side, (went_on, is_away));
        }
    }

    /// Returns whether this host's knowledge of the guest is newer than the result of this attempt.
    fn went_on(&self, world: &World, index: usize, host: usize) -> bool {
        let of = world.attempts[index].generation;
        let later = world.attempts.iter().any(|attempt| {
            let side = &attempt.sides[host ^ usize::from(attempt.from)];
            let recorded = !side.journal.is_empty() || side.tail != 0;
            attempt.begun && attempt.generation > of && recorded
        });
        let after_next = self.terms(index, &world.attempts[index]).after_next();
        later || u64::from(world.hosts[host].generation) > after_next.0
    }

    /// Returns whether an attempt that never released the guest finds it taken away by another one.
    fn is_away(&self, world: &World, index: usize, host: usize) -> bool {
        let records = |side: &Side| {
            let numbers = side
                .journal
                .iter()
                .chain((side.tail != 0).then_some(side.tail));
            numbers.map(|number| self.records.record(number)).collect()
        };
        let has_released = |records: &Vec<&Record>| {
            let mut records = records.iter();
            records.any(|record| record.is_release())
        };
        let is_back = |records: &Vec<&Record>| {
            records.iter().any(|record| match record {
                Record::Aborted { .. } => true,
                Record::Overruled { run_on, .. } => *run_on == handover::Side::Source,
                _ => false,
            })
        };
        let of = &world.attempts[index];
        if has_released(&records(&of.sides[SOURCE])) {
            return false;
        }
        let another = world.attempts.iter().enumerate().any(|(number, attempt)| {
            let found = records(&attempt.sides[SOURCE]);
            let is_here = attempt.begun && usize::from(attempt.from) == host;
            number != index && is_here && has_released(&found) && !is_back(&found)
        });
        let right = &world.hosts[host];
        another || right.generation > of.generation && right.holder != Holder::Here
    }

    /// Leaves the guest alone: it has gone on since an operator's statement, or another attempt has
    /// it away. The destination hears how this one ended.
    fn leave_guest(
        &self,
        world: &mut World,
        index: usize,
        side: usize,
        (went_on, is_away): (bool, bool),
    ) {
        let it = &mut world.attempts[index].sides[side];
        let overruled = side == SOURCE
            && it.state != 0
            && *self.source.state(it.state) == SourceState::Overruled;
        let passed_on = overruled && went_on && self.setting.variant != Variant::OverruledAgain;
        let is_away = is_away && self.setting.variant != Variant::BeganResumes;
        if passed_on || is_away {
            let source = &self.source;
            it.todo.retain(|action| !source.action(action).lets_go_on());
        }
    }

    /// Restores the state from the journal.
    pub(crate) fn take_up(&mut self, world: &mut World, index: usize, side: usize) {
        let terms = self.terms(index, &world.attempts[index]);
        let it = &mut world.attempts[index].sides[side];
        if it.tail != 0 {
            let tail = std::mem::take(&mut it.tail);
            if self.records.record(tail).is_release() {
                self.seen.add(Outcome::ReleasedByFailedWrite);
            }
            let all_present = matches!(self.records.record(tail), Record::AllPresent { .. });
            let room = it.journal.push(tail);
            world.attempts[index].all_present |= all_present;
            if !room {
                world.blame(Property::Capacity);
            }
        }
        let it = &mut world.attempts[index].sides[side];
        if it.journal.is_empty() {
            return;
        }
        if side == SOURCE {
            // An attempt that was never offered ends now.
            it.ended = None;
        }
        let records: Vec<Record> = it
            .journal
            .iter()
            .map(|number| self.records.record(number).clone())
            .collect();
        (it.state, it.todo) = if side == SOURCE {
            self.source.restore(&records, &terms)
        } else {
            self.destination.restore(&records, &terms)
        };
        if side == SOURCE && *self.source.state(it.state) == SourceState::Done {
            // An operator's statement that was not recorded binds nobody.
            world.attempts[index].overruled[SOURCE] = false;
        }
        let it = &world.attempts[index].sides[side];
        if side == DESTINATION && self.setting.variant != Variant::ReadyUnseen {
            let ready = *self.destination.state(it.state) == DestinationState::Ready;
            let host = world.attempts[index].host(DESTINATION);
            if ready && world.hosts[host].qemu != Qemu::Loaded {
                self.feed_destination(world, index, DestinationEvent::QemuGone);
            }
        }
        self.go_on(world, index, side);
    }

    // QEMU.

    /// Lets the guest go on, or leaves that to its owner.
    pub(crate) fn let_live(&self, world: &mut World, host: usize, paused: bool) {
        world.hosts[host].qemu = if paused { Qemu::Paused } else { Qemu::Running };
        if world.hosts[host ^ 1].qemu.is_live() {
            world.blame(Property::TwoCopies);
        }
        if self.setting.paused && !paused {
            world.blame(Property::PausedStarted);
        }
        let copy = world.hosts[host].copy;
        let mut forgiven = false;
        for attempt in world.attempts.iter_mut().filter(|attempt| attempt.begun) {
            if usize::from(attempt.from) == host {
                forgiven |= attempt.overruled[SOURCE];
                if attempt.snapshot == Snapshot::Good {
                    attempt.snapshot = Snapshot::Void;
                }
            }
        }
        if copy < world.newest && !forgiven {
            world.blame(Property::OldCopy);
        }
        world.newest = copy;
    }

    // What the journals say.

    /// Finds two journals that both claim the right to run.
    pub(crate) fn check_claims(&mut self, world: &mut World) {
        for index in 0..world.begun() {
            let attempt = world.attempts[index];
            if attempt.overruled != [false; 2] {
                continue;
            }
            let both = [SOURCE, DESTINATION]
                .iter()
                .all(|side| self.claims(index, &attempt, *side));
            if both {
                world.blame(Property::TwoClaims);
            }
        }
    }

    fn claims(&mut self, index: usize, attempt: &Attempt, side: usize) -> bool {
        let it = &attempt.sides[side];
        if it.journal.is_empty() && it.tail == 0 {
            return it.ended == Some(true);
        }
        let question = (index, attempt.generation, side, it.journal, it.tail);
        if let Some(claims) = self.claims.get(&question) {
            return *claims;
        }
        let numbers = it.journal.iter().chain((it.tail != 0).then_some(it.tail));
        let records: Vec<Record> = numbers
            .map(|number| self.records.record(number).clone())
            .collect();
        let terms = self.terms(index, attempt);
        let claims = if side == SOURCE {
            use SourceState as Is;
            let (state, _) = self.source.restore(&records, &terms);
            matches!(
                self.source.state(state),
                Is::Aborting | Is::Aborted | Is::Overruled | Is::Closed { here: true }
            )
        } else {
            let (state, _) = self.destination.restore(&records, &terms);
            self.destination.state(state).owns_guest()
        };
        self.claims.insert(question, claims);
        claims
    }

    pub(crate) fn fits(&self) -> bool {
        self.source.fits && self.destination.fits
    }

    // Outcomes.

    fn see_source(&mut self, state: u8, event: u8) {
        use SourceEvent as On;
        use SourceState as Is;
        let outcome = match (self.source.state(state), self.source.event(event)) {
            (Is::Here { .. }, On::Abort(_)) => Outcome::AbortedBeforeRelease,
            (Is::Released { .. }, On::PeerAborted(_)) => Outcome::AbortedAfterRelease,
            (Is::Released { arbiter: Some(_) }, On::Granted(_)) => Outcome::GivenBackByArbiter,
            (Is::Overruling { .. }, On::Written(_)) => Outcome::OverruledToSource,
            (Is::Closed { here: true } | Is::Aborted, On::Committed(_) | On::AllPresent(_)) => {
                Outcome::Conceded
            }
            _ => return,
        };
        self.seen.add(outcome);
    }

    fn see_destination(&mut self, state: u8, event: u8) {
        use DestinationEvent as On;
        use DestinationState as Is;
        let outcome = match (self.destination.state(state), self.destination.event(event)) {
            (Is::Returning { .. }, On::Written(_)) => Outcome::Returned,
            (Is::Committing, On::Written(Record::Overruled { .. })) => {
                Outcome::OverruledToDestination
            }
            (Is::Yielding, On::Written(_)) => Outcome::Conceded,
            (Is::Claiming { .. }, On::Granted(_)) => Outcome::CommittedWithLease,
            (Is::Claiming { .. }, On::Denied(_)) => Outcome::LeaseDenied,
            (Is::Aborted, On::Commit(..)) => Outcome::LateCommitRefused,
            (Is::Unknown, On::Asked) => Outcome::AbortedUnknown,
            (Is::Receiving { .. }, On::Commit(..)) => Outcome::CommittedEarly,
            _ => return,
        };
        self.seen.add(outcome);
    }
}

/// Notes who may run the guest; a note of a newer generation stays.
pub(crate) fn note(world: &mut World, host: usize, generation: Generation, holder: Holder) {
    let host = &mut world.hosts[host];
    let generation = generation.0 as u8;
    if host.generation <= generation {
        (host.generation, host.holder) = (generation, holder);
    }
}

/// Returns to a generation from the next one, if that is the noted one.
pub(crate) fn give_back(
    world: &mut World,
    host: usize,
    generation: Generation,
    (taken, holder): (Holder, Holder),
) {
    let host = &mut world.hosts[host];
    let generation = generation.0 as u8;
    let expected = (host.generation, host.holder) == (generation + 1, taken);
    if expected || host.generation <= generation {
        (host.generation, host.holder) = (generation, holder);
    }
}

pub(crate) fn send(world: &mut World, index: usize, message: Message) {
    world.net |= 1 << message.bit(index);
}
