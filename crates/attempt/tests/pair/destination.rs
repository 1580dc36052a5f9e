//! The destination's owner in this world.

use crate::source::began;
use crate::variant::Variant;
use crate::world::{Frame, Holder, In, Item, Packet, Qemu, Side, World};
use longhaul_attempt::Destination;
use longhaul_attempt::destination::{Action, Config, Event, FromSource, Note};
use longhaul_attempt::source::Claimed;
use longhaul_engine::handover::{DestinationState, Record};
use longhaul_protocol::Epoch;
use longhaul_protocol::message::{ToDestination, ToSource};

impl World {
    fn destination_config(&self, attempt: u32) -> Config {
        Config {
            terms: self.terms(attempt),
            patience: self.plan.patience,
            verify: self.plan.verify,
            fetches: self.plan.later != 0,
            awaits_bases: false,
        }
    }

    fn inn(&self, core: Destination, attempt: u32) -> In {
        In {
            core,
            attempt,
            conn: None,
            caller: None,
            epoch: Epoch(0),
            applied: 0,
            complete: None,
            everything: false,
            fetching: false,
            wake: None,
            server: None,
            whole: false,
            lost: false,
        }
    }

    pub(crate) fn in_of(&self, attempt: u32) -> Option<usize> {
        self.inn.iter().position(|inn| inn.attempt == attempt)
    }

    // The beginning.

    fn offered(&mut self, conn: u32, attempt: u32) {
        let b = &self.hosts[1];
        let closed = b.closed.contains(&attempt) && self.variant != Variant::ClosedOfferAccepted;
        let known = b.journals.contains_key(&attempt) || self.in_of(attempt).is_some();
        if closed || known || b.reserved.is_some() || b.qemu.is_some() {
            self.say(|| format!("B refuses attempt {attempt}"));
            return self.transmit(conn, Side::A, Packet::Refused);
        }
        self.b().reserved = Some(attempt);
        let side = longhaul_engine::handover::Side::Destination;
        let agent = self.hosts[1].agent;
        if !self.append(Side::B, attempt, &began(self.terms(attempt), side)) {
            if self.hosts[1].agent == agent {
                self.b().reserved = None;
                self.b().journals.remove(&attempt);
                self.transmit(conn, Side::A, Packet::Refused);
            }
            return;
        }
        let host = self.b();
        host.qemu = Some(Qemu {
            attempt,
            running: false,
            generation: 0,
            exports: true,
        });
        (host.missing, host.unsynced, host.content) = (0, 0, [0; 8]);
        host.server = None;
        let core = Destination::new(self.destination_config(attempt));
        let mut inn = self.inn(core, attempt);
        inn.conn = Some(conn);
        inn.epoch = Epoch(1);
        self.inn.push(inn);
        self.say(|| format!("B accepts attempt {attempt}"));
        self.transmit(conn, Side::A, Packet::Launching);
        self.drive_b(attempt);
    }

    fn restore_in(&mut self, attempt: u32, caller: Option<u32>) {
        let records = self.hosts[1]
            .journals
            .get(&attempt)
            .cloned()
            .unwrap_or_default();
        let config = self.destination_config(attempt);
        let core = Destination::restore(config, &records, self.now);
        let mut inn = self.inn(core, attempt);
        inn.caller = caller;
        self.inn.push(inn);
        self.look(attempt);
        self.drive_b(attempt);
    }

    /// A copy that waits for a decision may have ended meanwhile.
    fn look(&mut self, attempt: u32) {
        let Some(n) = self.in_of(attempt) else { return };
        let ready = *self.inn[n].core.state() == DestinationState::Ready;
        if ready && self.hosts[1].qemu.is_none() && self.variant != Variant::ReadyUnseen {
            self.inn[n].core.handle(Event::QemuGone, self.now);
        }
    }

    pub(crate) fn recover_b(&mut self) {
        let journals: Vec<_> = self.hosts[1].journals.clone().into_iter().collect();
        for (attempt, records) in journals {
            if matches!(records.last(), Some(Record::Closed { .. })) {
                self.b().journals.remove(&attempt);
                continue;
            }
            self.b().reserved = Some(attempt);
            self.restore_in(attempt, None);
            if !self.hosts[1].up {
                return;
            }
        }
    }

    /// A source comes back, over a new connection.
    pub(crate) fn called(&mut self, conn: u32, attempt: u32, epoch: Option<Epoch>) {
        if self.hosts[1].closed.contains(&attempt) {
            return self.transmit(conn, Side::A, Packet::ToA(ToSource::Closed));
        }
        if self.in_of(attempt).is_none() {
            self.restore_in(attempt, Some(conn));
        }
        self.look(attempt);
        let Some(n) = self.in_of(attempt) else { return };
        self.inn[n].caller = Some(conn);
        self.tell_b(attempt, Event::Called(epoch));
    }

    // Actions.

    pub(crate) fn tell_b(&mut self, attempt: u32, event: Event) {
        if let Some(n) = self.in_of(attempt) {
            self.say(|| format!("B{attempt} <- {event:?}"));
            self.inn[n].core.handle(event, self.now);
            self.drive_b(attempt);
        }
    }

    pub(crate) fn drive_b(&mut self, attempt: u32) {
        let agent = self.hosts[1].agent;
        while let Some(n) = self.in_of(attempt) {
            let Some(action) = self.inn[n].core.poll_action() else {
                break;
            };
            self.say(|| format!("B{attempt} -> {action:?}"));
            self.apply_b(n, attempt, action);
            if self.hosts[1].agent != agent || self.failure.is_some() {
                return;
            }
        }
        let Some(n) = self.in_of(attempt) else { return };
        if self.inn[n].core.is_idle() && self.inn[n].caller.is_none() {
            // The journal answers for it.
            self.inn.remove(n);
            if self.hosts[1].reserved == Some(attempt) {
                self.b().reserved = None;
            }
            return;
        }
        if let Some(at) = self.inn[n].core.poll_timeout()
            && self.inn[n]
                .wake
                .is_none_or(|wake| at < wake || wake <= self.now)
        {
            self.inn[n].wake = Some(at);
            self.at(at, Item::Wake(Side::B, attempt, agent));
        }
    }

    fn handle_b(&mut self, n: usize, event: Event) {
        self.say(|| format!("  B <- {event:?}"));
        self.inn[n].core.handle(event, self.now);
    }

    fn decline(&mut self, n: usize) {
        if let Some(conn) = self.inn[n].caller.take() {
            let attempt = self.inn[n].core.terms().attempt;
            let state = self.inn[n].core.attempt_state();
            let status = ToSource::Status { attempt, state };
            self.transmit(conn, Side::A, Packet::ToA(status));
            self.close(conn, Side::A);
        }
    }

    fn take_caller(&mut self, n: usize) {
        let caller = self.inn[n].caller.take();
        if let Some(old) = std::mem::replace(&mut self.inn[n].conn, caller) {
            self.close(old, Side::A);
        }
    }

    fn apply_b(&mut self, n: usize, attempt: u32, action: Action) {
        match action {
            Action::Take => self.take_caller(n),
            Action::Accept(epoch) => {
                self.serve(attempt);
                if self.inn[n].fetching && !self.listens(n) {
                    self.decline(n);
                    return self.handle_b(n, Event::Accepted(false));
                }
                self.take_caller(n);
                let inn = &mut self.inn[n];
                inn.epoch = epoch;
                inn.applied = 0;
                inn.complete = None;
                let state = inn.core.attempt_state();
                if let Some(conn) = inn.conn {
                    self.transmit(conn, Side::A, Packet::Resumed(state));
                }
                self.handle_b(n, Event::Accepted(true));
            }
            Action::Decline => self.decline(n),
            Action::Hangup => {
                if let Some(conn) = self.inn[n].conn.take() {
                    self.close(conn, Side::A);
                }
            }
            Action::Send(message) => {
                if let Some(conn) = self.inn[n].conn {
                    self.transmit(conn, Side::A, Packet::ToA(message));
                }
            }
            Action::SendAccepted => {
                if let Some(conn) = self.inn[n].conn {
                    self.transmit(conn, Side::A, Packet::Accepted);
                }
            }
            Action::SendMissing => {
                self.inn[n].lost = false;
                let Some(missing) = self.missing_b(n) else {
                    if let Some(conn) = self.inn[n].conn.take() {
                        self.close(conn, Side::A);
                    }
                    return self.handle_b(n, Event::Lost { meant: None });
                };
                if let Some(conn) = self.inn[n].conn {
                    self.transmit(conn, Side::A, Packet::Missing(missing));
                }
            }
            Action::Load => {
                self.load_without(n);
                let agent = self.hosts[1].agent;
                self.after(1, 50, Item::Loaded(attempt, agent));
                self.after(1, 100, Item::Settled(attempt, agent));
            }
            Action::AskReady => {
                let refused = self.plan.hook_refuses && self.rng.one_in(2);
                let answer = if refused {
                    Err("a hook".to_owned())
                } else {
                    Ok(())
                };
                self.handle_b(n, Event::MayBeReady(answer));
            }
            Action::Write(record) => {
                let written = self.append(Side::B, attempt, &record);
                if self.inn.len() > n {
                    self.handle_b(
                        n,
                        match written {
                            true => Event::Written(record),
                            false => Event::WriteFailed(record),
                        },
                    );
                }
            }
            Action::Note(note) => {
                let right = match &note {
                    Note::Here(generation) => (generation.0, Holder::Here),
                    Note::BackThere => (self.generation(attempt), Holder::There),
                    Note::Conceded(generation) => (generation.0, Holder::There),
                };
                let back = note == Note::BackThere;
                let noted = self.note(Side::B, right, back);
                self.handle_b(
                    n,
                    match noted {
                        true => Event::Noted(note),
                        false => Event::NoteFailed(note),
                    },
                );
            }
            Action::Resume => {
                let event = self.resume_b(n);
                self.handle_b(n, event);
            }
            Action::Quit => {
                let variant = self.variant;
                let host = self.b();
                (host.missing, host.unsynced, host.server) = (0, 0, None);
                if variant == Variant::ExportsEndLate {
                    let had = host.qemu.take().is_some_and(|qemu| qemu.exports);
                    host.exports_left |= had;
                    let agent = host.agent;
                    self.after(1, 20, Item::ExportsEnd(agent));
                } else if host
                    .qemu
                    .as_ref()
                    .is_some_and(|qemu| qemu.attempt == attempt)
                {
                    if self.running(Side::B) {
                        self.fail("a copy that runs is quit");
                    }
                    self.b().qemu = None;
                }
                self.handle_b(n, Event::QemuGone);
            }
            Action::Fetch => {
                self.inn[n].fetching = true;
                self.fetch_memory(n);
                if let Some(conn) = self.inn[n].conn {
                    self.transmit(conn, Side::A, Packet::Summary);
                }
                self.may_be_present();
            }
            Action::FillMissing => {
                self.end_without_memory();
                let missing = self.hosts[1].missing;
                for block in (0..self.truth.len()).filter(|block| missing & 1 << block != 0) {
                    (self.truth[block], self.hosts[1].content[block]) = (0, 0);
                }
                let host = self.b();
                host.unsynced |= host.missing;
                host.missing = 0;
                self.may_be_present();
            }
            Action::ShowDoubt => {}
            Action::CheckArbiter(_) => {
                let reached = self.now >= self.arbiter_down_until;
                self.handle_b(n, Event::Arbiter(reached));
            }
            Action::Claim(_) if self.variant == Variant::LeaseSkipped => {
                self.handle_b(n, Event::Claimed(Claimed::Granted));
            }
            Action::Claim(_) => self.claim(Side::B, attempt),
            Action::Finish => {
                self.b().journals.remove(&attempt);
                self.b().closed.push(attempt);
                if self.hosts[1].reserved == Some(attempt) {
                    self.b().reserved = None;
                }
                if let Some(conn) = self.inn[n].conn {
                    self.transmit(conn, Side::A, Packet::ToA(ToSource::Closed));
                }
                self.inn.remove(n);
            }
        }
    }

    fn resume_b(&mut self, n: usize) -> Event {
        let live = self.inn[n].everything;
        let refuses = self.plan.refuses_cont && live;
        let next = self.inn[n].core.terms().next().0;
        let right = self.hosts[1].right;
        let Some(qemu) = &mut self.hosts[1].qemu else {
            // It may have run, and ended here.
            return Event::Resumed;
        };
        if qemu.generation == next || right.0 > next {
            return Event::Resumed;
        }
        if refuses {
            return Event::ResumeFailed("cont".to_owned());
        }
        (qemu.running, qemu.generation) = (true, next);
        let leased = self.hosts[1].leases.contains(&next);
        let unneeded = self.hosts[0].dead || self.variant == Variant::LeaseSkipped;
        if self.plan.requires_arbiter && !leased && !unneeded {
            self.fail("the guest has moved without the arbiter, which is required");
        }
        self.arbitrated[1] += u32::from(leased);
        self.held_since = None;
        self.check();
        for block in 0..self.truth.len() {
            let missing = self.hosts[1].missing & (1 << block) != 0;
            if !missing && self.hosts[1].content[block] != self.truth[block] {
                let text = format!("the guest begins with an old block {block}");
                self.fail(&text);
            }
        }
        Event::Resumed
    }

    // What arrives.

    pub(crate) fn packet_b(&mut self, conn: u32, packet: Packet) {
        let attempt = self.conns[conn as usize].attempt;
        if matches!(packet, Packet::Offer) {
            return self.offered(conn, attempt);
        }
        let Some(n) = self.in_of(attempt) else { return };
        if let Packet::Frame(epoch, frame, block, version) = packet {
            return self.frame(n, conn, (epoch, frame, block, version));
        }
        if self.inn[n].conn != Some(conn) {
            return;
        }
        match packet {
            Packet::ToB(message) => {
                if let Some(message) = FromSource::of(&message) {
                    self.look(attempt);
                    self.tell_b(attempt, Event::Message(message));
                } else if let ToDestination::Start { .. } = message {
                    self.say(|| "B hears Start".to_owned());
                }
            }
            Packet::Unreadable(block) if self.hosts[1].missing & (1 << block) != 0 => {
                self.inn[n].lost = true;
            }
            Packet::Complete(epoch, frames, missing) if epoch == self.inn[n].epoch => {
                self.inn[n].complete = Some((epoch, frames, missing));
                self.may_be_everything(n);
            }
            _ => {}
        }
    }

    fn frame(&mut self, n: usize, conn: u32, frame: Frame) {
        let (epoch, number, block, version) = frame;
        let current = epoch == self.inn[n].epoch && self.inn[n].conn == Some(conn);
        if !current && self.variant != Variant::OldFramesApplied {
            return;
        }
        let bit = 1 << block;
        let later = self.inn[n].everything || self.inn[n].fetching;
        if later && self.is_page(block) {
            return self.page(n, conn, frame);
        }
        let inn = &self.inn[n];
        let receiving = matches!(inn.core.state(), DestinationState::Receiving { .. });
        if receiving && !inn.everything {
            self.b().content[usize::from(block)] = version;
        } else if self.inn[n].fetching && self.hosts[1].missing & bit != 0 {
            let host = self.b();
            host.content[usize::from(block)] = version;
            host.missing &= !bit;
            host.unsynced |= bit;
        }
        if current {
            self.inn[n].applied += 1;
            self.transmit(conn, Side::A, Packet::Ack(epoch, number));
            self.may_be_everything(n);
        }
        self.may_be_present();
    }

    fn may_be_everything(&mut self, n: usize) {
        let waits = self.variant != Variant::AnnouncementSuffices;
        let inn = &mut self.inn[n];
        let Some((_, frames, missing)) = inn.complete else {
            return;
        };
        if waits && inn.applied < frames || inn.everything {
            return;
        }
        inn.everything = true;
        let attempt = inn.attempt;
        let host = self.b();
        host.missing = missing;
        self.tell_b(attempt, Event::Everything);
    }

    /// Blocks that were missing may all be here.
    pub(crate) fn may_be_present(&mut self) {
        let Some(n) = self.inn.iter().position(|inn| inn.fetching) else {
            return;
        };
        if self.lacks(n) != 0 || !self.inn[n].core.is_fetching() {
            return;
        }
        if self.variant == Variant::PresentBeforeDurable {
            let attempt = self.inn[n].attempt;
            return self.tell_b(attempt, Event::AllPresent);
        }
        let unsynced = self.hosts[1].unsynced;
        self.after(1, 100, Item::Synced(unsynced));
    }

    pub(crate) fn synced(&mut self, blocks: u8) {
        let host = self.b();
        host.unsynced &= !blocks;
        let up = host.up;
        let mut inns = self.inn.iter();
        let fetching = inns.position(|inn| inn.fetching && inn.core.is_fetching());
        if let Some(n) = fetching.filter(|n| up && self.lacks(*n) == 0) {
            let attempt = self.inn[n].attempt;
            match self.hosts[1].unsynced {
                0 => self.tell_b(attempt, Event::AllPresent),
                _ => self.may_be_present(),
            }
        }
    }

    pub(crate) fn ended_b(&mut self, conn: u32) {
        let attempt = self.conns[conn as usize].attempt;
        let Some(n) = self.in_of(attempt) else { return };
        if self.inn[n].conn == Some(conn) {
            self.inn[n].conn = None;
            self.tell_b(attempt, Event::Lost { meant: None });
        }
    }
}
