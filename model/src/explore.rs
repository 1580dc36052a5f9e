//! Explores every reachable state, breadth first, so that the first failure has a shortest trace.
//!
//! The explorer is a page of our own code. Of the existing ones `stateright` (MIT, maintained) was
//! examined: its `eventually` asks for a path on which something happens, and is documented to miss
//! cycles and states with several ways to them, where the question here is what two fair schedules
//! make of *every* state; and it adds some forty packages, a web server among them.

use crate::liveness::Ends;
use crate::machine::{Machine, Setting};
use crate::outcome::Outcomes;
use crate::small::Fingerprints;
use crate::step::{Step, possible_steps};
use crate::world::{Budget, Property, World};
use std::time::{Duration, Instant};

/// The first path to a state.
#[derive(Debug, Clone, Copy)]
struct Origin {
    parent: u32,
    step: u16,
    /// The message that was lost because there were too many; 0 for none.
    lost: u8,
}

const NOTHING_LOST: u8 = u8::MAX;

/// A violated property, with its trace.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The violated property.
    pub property: Property,
    /// Steps to the failure; for endless doubt, to the state that it begins in.
    pub length: usize,
    /// The trace in readable form.
    pub trace: Vec<String>,
}

/// The results of an exploration.
#[derive(Debug, Clone)]
pub struct Found {
    /// The number of different states.
    pub states: usize,
    /// The number of steps to the most distant state.
    pub depth: usize,
    /// The number of states on the longest way out of doubt that was walked again.
    pub longest_end: usize,
    /// The outcomes seen.
    pub seen: Outcomes,
    /// The first violated property.
    pub failure: Option<Failure>,
    /// Whether the states exceeded the limit: the remaining ones are unknown.
    pub cut_short: bool,
    /// The duration.
    pub time: Duration,
}

struct Explorer {
    machine: Machine,
    ends: Ends,
    steps: Vec<Step>,
    known: Fingerprints,
    origins: Vec<Origin>,
    first: World,
}

/// Explores everything that a setting and a budget allow, or up to `states_max` states.
pub fn explore(setting: Setting, budget: Budget, states_max: usize) -> Found {
    let began = Instant::now();
    let mut explorer = Explorer {
        machine: Machine::new(setting),
        ends: Ends::default(),
        steps: possible_steps(&setting, &budget),
        known: Fingerprints::default(),
        origins: Vec::new(),
        first: World::new(setting.paused, budget),
    };
    let (depth, failure) = explorer.run(states_max);
    Found {
        states: explorer.origins.len(),
        depth,
        longest_end: explorer.ends.longest,
        seen: explorer.machine.seen,
        cut_short: failure.is_none() && explorer.origins.len() >= states_max,
        failure,
        time: began.elapsed(),
    }
}

impl Explorer {
    fn run(&mut self, states_max: usize) -> (usize, Option<Failure>) {
        let first = self.first;
        let mut layer = Vec::new();
        let nowhere = Origin {
            parent: 0,
            step: 0,
            lost: NOTHING_LOST,
        };
        if let Some(failure) = self.meet(first, nowhere, &mut layer) {
            return (0, Some(failure));
        }
        let mut depth = 0;
        while !layer.is_empty() {
            let mut next = Vec::new();
            for (world, index) in &layer {
                let busy = self.machine.busy_side(world);
                for number in 0..self.steps.len() {
                    if busy.is_some_and(|busy| !self.steps[number].is_of(busy)) {
                        continue;
                    }
                    let Some(after) = self.machine.apply(world, self.steps[number]) else {
                        continue;
                    };
                    let origin = Origin {
                        parent: *index,
                        step: number as u16,
                        lost: NOTHING_LOST,
                    };
                    if let Some(failure) = self.meet_all(after, origin, &mut next) {
                        return (depth + 1, Some(failure));
                    }
                }
                if self.origins.len() >= states_max {
                    return (depth + 1, None);
                }
            }
            layer = next;
            depth += usize::from(!layer.is_empty());
        }
        (depth, None)
    }

    /// Handles a new state; where too many messages are on their way, any one of them is lost.
    fn meet_all(
        &mut self,
        world: World,
        origin: Origin,
        layer: &mut Vec<(World, u32)>,
    ) -> Option<Failure> {
        if world.net.count_ones() <= self.machine.setting.messages {
            return self.meet(world, origin, layer);
        }
        for bit in 0..32 {
            if world.net & (1 << bit) != 0 {
                let mut world = world;
                world.net &= !(1 << bit);
                let origin = Origin {
                    lost: bit,
                    ..origin
                };
                let failure = self.meet_all(world, origin, layer);
                if failure.is_some() {
                    return failure;
                }
            }
        }
        None
    }

    fn meet(
        &mut self,
        world: World,
        origin: Origin,
        layer: &mut Vec<(World, u32)>,
    ) -> Option<Failure> {
        if !self.known.insert(world.fingerprint()) {
            return None;
        }
        let index = self.origins.len() as u32;
        self.origins.push(origin);
        if let Some(property) = world.broken {
            return Some(self.fail(property, index, &[]));
        }
        if self.machine.setting.doubt
            && let Some(way) = self.ends.check(&mut self.machine, &world)
        {
            return Some(self.fail(Property::Doubt, index, &way));
        }
        layer.push((world, index));
        None
    }

    /// Replays the path to a failure, recording the events.
    fn fail(&mut self, property: Property, index: u32, then: &[Step]) -> Failure {
        let mut way = Vec::new();
        let mut at = index;
        while at != 0 {
            let origin = self.origins[at as usize];
            way.push(origin);
            at = origin.parent;
        }
        way.reverse();
        let mut world = self.first;
        let mut trace = Vec::new();
        for origin in &way {
            let step = self.steps[usize::from(origin.step)];
            self.tell(&mut world, step, &mut trace);
            if origin.lost != NOTHING_LOST {
                world.net &= !(1 << origin.lost);
                let (message, index) = crate::world::Message::of(origin.lost);
                trace.push(format!("     {}: {message:?} is lost", index + 1));
            }
        }
        if !then.is_empty() {
            trace.push("  -- from here on nothing is lost and nobody crashes --".to_owned());
            world.budget = Budget::default();
            for step in then {
                self.tell(&mut world, *step, &mut trace);
            }
        }
        Failure {
            property,
            length: way.len(),
            trace,
        }
    }

    fn tell(&mut self, world: &mut World, step: Step, trace: &mut Vec<String>) {
        let doing = self.machine.tell_action(world, step);
        let Some(after) = self.machine.apply(world, step) else {
            return;
        };
        trace.push(format!("  {}{doing}", step.tell()));
        trace.extend(self.machine.tell_changes(world, &after));
        *world = after;
    }
}
