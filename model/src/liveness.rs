//! Checks that doubt ends. From a given state on, nothing is lost and nothing crashes any more, and
//! each of some fair schedules chooses the next step. A schedule sees the state alone, and a round
//! counter.

use crate::machine::Machine;
use crate::small::Fingerprints;
use crate::step::{Ending, Step};
use crate::world::{Budget, DESTINATION, Holder, Qemu, SOURCE, Side, World};
use longhaul_engine::handover::{DestinationState, SourceState};

/// The number of rounds of questions before a schedule gives up.
const ROUNDS: u8 = 5;
/// The maximum number of steps of one schedule.
const STEPS_MAX: usize = 400;

/// The choice of the next step, where several are possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// The source first; steps that move the guest on come before steps that give up.
    Onward,
    /// The destination first, the newest message first; a side that may give up does so at once.
    GivingUp,
}

/// States from which doubt is known to end.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    known: Fingerprints,
    /// The longest walked way to an end.
    pub(crate) longest: usize,
}

impl Ends {
    /// Returns the way into endless doubt, if there is one.
    pub(crate) fn check(&mut self, machine: &mut Machine, world: &World) -> Option<Vec<Step>> {
        // What journals that are lost knew, only a person can say.
        if world.hosts.iter().any(|host| host.lives != 0) {
            return None;
        }
        let mut start = *world;
        start.budget = Budget::default();
        // Either all messages on their way arrive, or the connections died with them.
        loop {
            let place = start.fingerprint();
            for schedule in [Schedule::Onward, Schedule::GivingUp] {
                if !self.known.contains(&at(place, schedule, 0))
                    && let Err(way) = self.walk(machine, start, schedule)
                {
                    return Some(way);
                }
            }
            if start.net == 0 {
                return None;
            }
            start.net = 0;
        }
    }

    fn walk(
        &mut self,
        machine: &mut Machine,
        mut world: World,
        schedule: Schedule,
    ) -> Result<(), Vec<Step>> {
        let mut way = Vec::new();
        let mut passed = Vec::new();
        let mut round = 0;
        while way.len() < STEPS_MAX {
            let place = at(world.fingerprint(), schedule, round);
            if self.known.contains(&place) {
                break;
            }
            passed.push(place);
            let next = next_step(machine, &world, schedule);
            if let Some((step, next)) = next {
                way.push(step);
                world = next;
                continue;
            }
            if is_decided(machine, &world) {
                break;
            }
            if round == ROUNDS {
                return Err(way);
            }
            for step in new_round(schedule, round) {
                if let Some(next) = machine.apply(&world, step) {
                    way.push(step);
                    world = next;
                }
            }
            round += 1;
        }
        if way.len() >= STEPS_MAX {
            return Err(way);
        }
        self.longest = self.longest.max(passed.len());
        self.known.extend(passed);
        Ok(())
    }
}

/// Returns a state together with the schedule's round.
fn at(fingerprint: u64, schedule: Schedule, round: u8) -> u64 {
    let number = u64::from(round) * 2 + u64::from(schedule == Schedule::GivingUp) + 1;
    fingerprint ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Returns the step taken when no other is left: the source asks, and one schedule gives up.
fn new_round(schedule: Schedule, round: u8) -> Vec<Step> {
    let mut steps: Vec<Step> = (0..2).map(|index| Step::Connect { index }).collect();
    if schedule == Schedule::GivingUp {
        steps.reverse();
    }
    if round > 0 {
        // An operator decides for a host that never returns; others have returned.
        let sides = [SOURCE, DESTINATION];
        // The arbiter, if this schedule has one, decides before an operator.
        let claims = [SOURCE, DESTINATION].map(|side| {
            (0..2).map(move |index| Step::Claim {
                index,
                side,
                answered: true,
            })
        });
        let claims = claims.into_iter().flatten();
        steps.extend(claims.filter(|_| schedule == Schedule::Onward));
        steps.extend((0..2).flat_map(|index| {
            let overrule = |side| Step::Overrule { index, side };
            sides
                .map(overrule)
                .into_iter()
                .chain([Step::GiveUp { index }])
        }));
        steps.extend((0..2).map(|host| Step::Reclaim { host }));
    }
    if round == 2 {
        steps.extend(
            (0..2).flat_map(|index| [DESTINATION, SOURCE].map(|side| Step::Abort { index, side })),
        );
    }
    steps
}

fn next_step(machine: &mut Machine, world: &World, schedule: Schedule) -> Option<(Step, World)> {
    let giving_up = schedule == Schedule::GivingUp;
    let [first, second] = if giving_up { [1, 0] } else { [0, 1] };
    let hosts = [first, second];
    let sides = [(first, 0), (first, 1), (second, 0), (second, 1)];
    let mut take = |step| Some((step, machine.apply(world, step)?));
    let ending = Ending::Well;
    let restarts = hosts.map(|host| Step::Restart { host });
    let prepares = [0, 1].map(|index| Step::Prepare { index, ending });
    let acts = sides.map(|(side, index)| Step::Act {
        index,
        side,
        ending,
    });
    let first = restarts.into_iter().chain(prepares).chain(acts);
    if let Some(taken) = first.into_iter().find_map(&mut take) {
        return Some(taken);
    }
    if giving_up {
        // In doubt the source would ask forever.
        let open = |(side, index): &(usize, usize)| {
            *side == DESTINATION
                || world.hosts[world.attempts[*index].host(SOURCE)]
                    .qemu
                    .is_live()
        };
        let aborts = sides.into_iter().filter(open);
        let aborts = aborts.map(|(side, index)| Step::Abort { index, side });
        if let Some(taken) = aborts.into_iter().find_map(&mut take) {
            return Some(taken);
        }
    }
    let mut left = world.net;
    while left != 0 {
        let bit = if giving_up {
            31 - left.leading_zeros()
        } else {
            left.trailing_zeros()
        };
        left &= !(1 << bit);
        let (bit, again) = (bit as u8, false);
        if let Some(taken) = take(Step::Deliver { bit, again }) {
            return Some(taken);
        }
    }
    let own = sides
        .into_iter()
        .flat_map(|(side, index)| [Step::SeeGone { index, side }, Step::Retry { index, side }]);
    // A destination that never returns would be told forever.
    let own = own.filter(|step| match step {
        Step::SeeGone { index, side } => {
            let other = world.attempts[*index].host(*side ^ 1);
            *side != SOURCE || !world.hosts[other].buried
        }
        _ => true,
    });
    let onward = [0, 1].into_iter().flat_map(|index| {
        [
            Step::Stop { index },
            Step::ShutAndStay { index },
            Step::Complete { index },
            Step::Serve { index },
            Step::Give { index },
            Step::Place { index },
            Step::Keep { index },
            Step::SayLost { index },
            Step::AllPresent { index },
        ]
    });
    // The other schedule has no arbiter.
    let claims = [0, 1].map(|index| Step::Claim {
        index,
        side: DESTINATION,
        answered: true,
    });
    let own = own.chain(claims.into_iter().filter(|_| !giving_up));
    let wakes = hosts.map(|host| Step::LoseSocket { host });
    own.chain(onward).chain(wakes).find_map(take)
}

/// Returns whether both sides are settled and agree: one owner, whose guest is as it should be, and
/// both journals at their ends.
fn is_decided(machine: &Machine, world: &World) -> bool {
    let buried = world.hosts.map(|host| host.buried);
    match buried {
        [false, false] => {}
        [true, true] => return true,
        [true, false] => return is_decided_alone(machine, world, 1),
        [false, true] => return is_decided_alone(machine, world, 0),
    }
    let closed = world
        .attempts
        .iter()
        .filter(|attempt| attempt.begun)
        .all(|attempt| {
            let [source, _] = &attempt.sides;
            let overruled = attempt.overruled != [false; 2];
            let (here, there) = (
                source_end(machine, source),
                destination_end(machine, &attempt.sides),
            );
            match (here, there) {
                (Some(here), Some(there)) => overruled || here != there,
                _ => false,
            }
        });
    let live = [Qemu::Running, Qemu::Paused, Qemu::Dead, Qemu::Halted];
    let owners = [0, 1].map(|host| world.hosts[host].holder == Holder::Here);
    let stand = (0..2).all(|host| {
        let qemu = world.hosts[host].qemu;
        if owners[host] {
            // A copy that had ended before the guest was taken back is started again.
            let mut attempts = world.attempts.iter();
            let taken_back = attempts
                .any(|attempt| attempt.overruled[SOURCE] && usize::from(attempt.from) == host);
            live.contains(&qemu) || taken_back && qemu == Qemu::None
        } else {
            !qemu.is_there()
        }
    });
    closed && owners[0] != owners[1] && stand
}

/// Returns whether the guest is as it should be on a host whose other one never returns, and its
/// name is free: it belongs to this host, or it never did and was lost with the other one.
fn is_decided_alone(machine: &Machine, world: &World, host: usize) -> bool {
    let it = &world.hosts[host];
    let good = match it.holder {
        Holder::Here => !it.qemu.is_stopped() && it.qemu != Qemu::Incoming,
        Holder::Unknown => !it.qemu.is_there(),
        Holder::Elsewhere | Holder::InDoubt => false,
    };
    good && it.qemu != Qemu::Loaded && !machine.is_busy(world, host, None)
}

/// Returns whether the guest is the source's, when its journal is at its end.
fn source_end(machine: &Machine, side: &Side) -> Option<bool> {
    match (machine.source_state(side), side.ended) {
        // It was never offered. A journal that it has stays until the next start.
        (None, ended) => Some(ended.unwrap_or(true)),
        (Some(SourceState::Closed { here }), _) => Some(*here),
        (Some(_), _) => None,
    }
}

/// Returns whether the guest is the destination's, when its journal is at its end. If the source's
/// is removed, an answer to a late question may remain.
fn destination_end(machine: &Machine, [source, side]: &[Side; 2]) -> Option<bool> {
    if side.journal.is_empty() && side.state == 0 {
        return Some(side.ended.unwrap_or(false));
    }
    let aborted = matches!(
        machine.destination_state(side),
        None | Some(DestinationState::Aborted)
    );
    let answered = aborted && source.ended.is_some() && side.journal.len() == 1;
    answered.then(|| side.ended.unwrap_or(false))
}
