//! Executes the actions of both sides, one at a time.

use crate::machine::{Machine, give_back, note, send};
use crate::outcome::Outcome;
use crate::step::Ending;
use crate::variant::Variant;
use crate::world::{DESTINATION, Holder, Message, Property, Qemu, SOURCE, Snapshot, World};
use longhaul_engine::handover::{
    DestinationAction, DestinationEvent, DestinationState, Record, SourceAction, SourceEvent,
};
use longhaul_protocol::Generation;

impl Machine {
    /// Executes the next action of a side; returns `None` where there is none, or it cannot end so.
    pub(crate) fn act(
        &mut self,
        world: &mut World,
        index: usize,
        side: usize,
        ending: Ending,
    ) -> Option<()> {
        let attempt = &mut world.attempts[index];
        let host = attempt.host(side);
        if !attempt.begun || !world.hosts[host].up {
            return None;
        }
        let action = attempt.sides[side].todo.pop_front()?;
        if side == SOURCE {
            let unresumed = world.attempts[index].sides[SOURCE].unresumed
                && self.setting.variant != Variant::ClosedUnresumed;
            match self.source.action(action).clone() {
                SourceAction::Write(record @ Record::Closed { .. }) if unresumed => {
                    if ending != Ending::Well {
                        return None;
                    }
                    let number = self.records.number(record);
                    world.attempts[index].sides[SOURCE].unwritten = number;
                }
                SourceAction::Write(record) => self.write(world, index, side, record, ending)?,
                SourceAction::Resume => self.resume_source(world, index, ending)?,
                _ if ending != Ending::Well => return None,
                action => self.act_source(world, index, action),
            }
        } else {
            match self.destination.action(action).clone() {
                DestinationAction::Write(record) => {
                    self.write(world, index, side, record, ending)?;
                }
                DestinationAction::Resume => self.resume_destination(world, index, ending)?,
                _ if ending != Ending::Well => return None,
                action => self.act_destination(world, index, action),
            }
        }
        self.go_on(world, index, side);
        Some(())
    }

    /// Retries the write of a record that failed.
    pub(crate) fn retry(&mut self, world: &mut World, index: usize, side: usize) -> Option<()> {
        let attempt = &mut world.attempts[index];
        let host = attempt.host(side);
        let it = &mut attempt.sides[side];
        let waits = attempt.begun && world.hosts[host].up && it.todo.is_empty();
        if waits && it.unresumed {
            let action = self.source.action_number(SourceAction::Resume);
            return it.todo.push(action).then_some(());
        }
        if !waits || it.unwritten == 0 {
            return None;
        }
        let record = self.records.record(it.unwritten).clone();
        it.unwritten = 0;
        it.again = true;
        let action = if side == SOURCE {
            self.source.action_number(SourceAction::Write(record))
        } else {
            self.destination
                .action_number(DestinationAction::Write(record))
        };
        it.todo.push(action).then_some(())
    }

    fn write(
        &mut self,
        world: &mut World,
        index: usize,
        side: usize,
        record: Record,
        ending: Ending,
    ) -> Option<()> {
        let number = self.records.number(record.clone());
        let attempt = &mut world.attempts[index];
        let it = &mut attempt.sides[side];
        let (mut room, mut present) = (true, false);
        match ending {
            Ending::Well => {
                if !self.setting.variant.skips(&record) {
                    room = it.journal.push(number);
                    it.tail = 0;
                }
                let all_present = matches!(record, Record::AllPresent { .. });
                attempt.all_present |= all_present;
                present = all_present;
            }
            Ending::FailedLost => it.tail = 0,
            Ending::FailedDurable => it.tail = number,
            Ending::FailedKept if it.tail != 0 && it.tail != number => {}
            Ending::FailedKept | Ending::Refused | Ending::Died => return None,
        }
        let it = &mut attempt.sides[side];
        let well = ending == Ending::Well;
        if !well {
            world.budget.failed_writes = world.budget.failed_writes.checked_sub(1)?;
        }
        if !well && it.again {
            it.unwritten = number;
        } else {
            let event = self.written(side, record, well);
            room &= it.events.push(event);
        }
        if present && self.misses(world, index) {
            world.blame(Property::LostWrites);
        }
        if !room {
            world.blame(Property::Capacity);
        }
        Some(())
    }

    fn written(&mut self, side: usize, record: Record, well: bool) -> u8 {
        match (side, well) {
            (SOURCE, true) => self.source.event_number(SourceEvent::Written(record)),
            (SOURCE, false) => self.source.event_number(SourceEvent::WriteFailed(record)),
            (_, true) => self
                .destination
                .event_number(DestinationEvent::Written(record)),
            (_, false) => self
                .destination
                .event_number(DestinationEvent::WriteFailed(record)),
        }
    }

    fn act_source(&mut self, world: &mut World, index: usize, action: SourceAction) {
        use SourceAction as Do;
        let host = world.attempts[index].host(SOURCE);
        match action {
            Do::Fence(generation) => note(world, host, generation, Holder::InDoubt),
            Do::Cede(generation) => {
                note(world, host, generation, Holder::Elsewhere);
                if self.setting.variant == Variant::QemuEndedEarly {
                    self.retire(world, index);
                }
            }
            Do::Concede(generation) => self.concede(world, host, generation),
            Do::Unfence(generation)
                if generation.0 == u64::from(world.attempts[index].generation) =>
            {
                give_back(world, host, generation, (Holder::InDoubt, Holder::Here));
            }
            Do::Unfence(generation) => note(world, host, generation, Holder::Here),
            Do::SendCommit(commit) => {
                let message = match commit.arbiter {
                    None => Message::Commit,
                    Some(_) => Message::CommitWithLease,
                };
                send(world, index, message);
            }
            Do::SendCancel(_) => send(world, index, Message::Cancel),
            Do::SendOverruled(_) => send(world, index, Message::Overruled),
            Do::SendDone => send(world, index, Message::Done),
            Do::Quit => self.retire(world, index),
            // Every connection begins with the question; records are written elsewhere.
            Do::Ask | Do::Write(_) | Do::Resume => {}
        }
    }

    /// Ends the source's copy, and removes its memory file.
    fn retire(&self, world: &mut World, index: usize) {
        let attempt = &mut world.attempts[index];
        let host = attempt.host(SOURCE);
        attempt.following.kept = false;
        if !attempt.all_present {
            world.blame(Property::RetiredEarly);
        }
        quit(world, host);
    }

    /// Resumes the guest at the source. QEMU may refuse, or not answer: it is tried again.
    fn resume_source(&mut self, world: &mut World, index: usize, ending: Ending) -> Option<()> {
        let attempt = &mut world.attempts[index];
        attempt.following.kept = false;
        let host = attempt.host(SOURCE);
        let is_stopped = world.hosts[host].qemu.is_stopped();
        let refused = match ending {
            Ending::Well => {
                if is_stopped {
                    self.let_live(world, host, self.setting.paused);
                }
                false
            }
            Ending::Refused if is_stopped => {
                world.budget.surprises = world.budget.surprises.checked_sub(1)?;
                self.seen.add(Outcome::NotResumed);
                true
            }
            _ => return None,
        };
        world.attempts[index].sides[SOURCE].unresumed = refused;
        Some(())
    }

    fn act_destination(&mut self, world: &mut World, index: usize, action: DestinationAction) {
        use DestinationAction as Do;
        let host = world.attempts[index].host(DESTINATION);
        match action {
            Do::SendReady => send(world, index, Message::Ready),
            Do::Own(generation) => note(world, host, generation, Holder::Here),
            Do::Yield(generation) => {
                give_back(world, host, generation, (Holder::Here, Holder::Elsewhere));
            }
            Do::Concede(generation) => self.concede(world, host, generation),
            Do::SendCommitted => send(world, index, Message::Committed),
            Do::SendAllPresent => send(world, index, Message::AllPresent),
            Do::SendAborted => send(world, index, Message::Aborted),
            Do::SendClosed => send(world, index, Message::Closed),
            Do::SendStatus => {
                let state = world.attempts[index].sides[DESTINATION].state;
                let waiting = matches!(
                    self.destination.state(state),
                    DestinationState::Beginning
                        | DestinationState::Receiving { .. }
                        | DestinationState::Readying
                        | DestinationState::Aborting { .. }
                        | DestinationState::Recording
                        | DestinationState::Returning { .. }
                        | DestinationState::GivingBack { .. }
                );
                // Other answers have no effect.
                if waiting {
                    send(world, index, Message::Waiting);
                }
            }
            Do::Quit => {
                quit(world, host);
                self.came(world, index, DestinationEvent::QemuGone);
            }
            Do::FillMissing => {
                self.end_without_memory(world, index);
                self.came(world, index, DestinationEvent::AllPresent);
            }
            // The arbiter's answer is a step of its own.
            Do::Claim(_) | Do::Write(_) | Do::Resume => {}
        }
    }

    fn concede(&self, world: &mut World, host: usize, generation: Generation) {
        let looks = self.setting.variant == Variant::ConcedeUnlessHere;
        if !looks || !world.hosts[host].qemu.is_there() {
            note(world, host, generation, Holder::Elsewhere);
        }
    }

    fn came(&mut self, world: &mut World, index: usize, event: DestinationEvent) {
        let event = self.destination.event_number(event);
        let side = &mut world.attempts[index].sides[DESTINATION];
        if !side.events.push(event) {
            world.blame(Property::Capacity);
        }
    }

    /// Executes `cont`, and interprets its answer.
    fn resume_destination(
        &mut self,
        world: &mut World,
        index: usize,
        ending: Ending,
    ) -> Option<()> {
        let host = world.attempts[index].host(DESTINATION);
        let qemu = world.hosts[host].qemu;
        let first = world.attempts[index].sides[DESTINATION].session;
        let mut event = DestinationEvent::Resumed;
        match (qemu, ending) {
            (Qemu::Loaded | Qemu::Incoming, Ending::Well) => {
                let attempt = &world.attempts[index];
                let whole = qemu == Qemu::Loaded && attempt.snapshot != Snapshot::Void;
                let forgiven = attempt.overruled[DESTINATION];
                let starts = self.setting.variant == Variant::PausedStarted;
                self.let_live(world, host, self.setting.paused && !starts);
                if !whole && !forgiven {
                    world.blame(Property::LostWrites);
                }
            }
            (Qemu::Loaded, Ending::Refused) => {
                world.budget.surprises = world.budget.surprises.checked_sub(1)?;
                if first {
                    event = DestinationEvent::ResumeFailed(String::new());
                } else {
                    // It may have run: an operator must inspect it.
                    world.hosts[host].qemu = Qemu::Halted;
                }
            }
            (Qemu::Loaded, Ending::Died) => {
                world.budget.surprises = world.budget.surprises.checked_sub(1)?;
                world.hosts[host].qemu = Qemu::Dead;
            }
            (Qemu::Halted, Ending::Well) => {
                if self.setting.variant == Variant::RefusalAfterRestart {
                    event = DestinationEvent::ResumeFailed(String::new());
                }
            }
            (_, Ending::Well) => {
                if qemu.is_live() {
                    self.seen.add(Outcome::ContTwice);
                }
            }
            _ => return None,
        }
        self.came(world, index, event);
        Some(())
    }
}

/// Ends a guest's QEMU, as its agent does.
fn quit(world: &mut World, host: usize) {
    if world.hosts[host].qemu.is_live() {
        world.blame(Property::RunningQuit);
    }
    world.hosts[host].qemu = Qemu::None;
}
