//! The source's owner in this world: does what the core says, and reports what came of it.

use crate::variant::Variant;
use crate::world::{Holder, MEMORY};
use crate::world::{Item, Out, Packet, Side, World, ms};
use longhaul_attempt::Source;
use longhaul_attempt::source::{Action, Claimed, Config, DialError, Event, FromDestination, Note};
use longhaul_engine::handover::{Record, SourceState, Terms};
use longhaul_protocol::message::{AttemptState, ToDestination, ToSource};
use longhaul_protocol::{Attempt, Epoch, Generation, HostId, MigrationId, StoreId};
use std::time::Duration;

pub(crate) const STORE: StoreId = StoreId([6; 16]);

/// Frames under way at a time.
const WINDOW: usize = 3;

pub(crate) fn began(terms: Terms, side: longhaul_engine::handover::Side) -> Record {
    Record::Began {
        migration: MigrationId([0; 8]),
        attempt: terms.attempt,
        side,
        guest: "guest".to_owned(),
        generation: terms.generation,
        peer: HostId([0; 32]),
        peer_name: "peer".to_owned(),
        paused: false,
    }
}

impl World {
    pub(crate) fn terms(&self, attempt: u32) -> Terms {
        Terms {
            attempt: Attempt(attempt),
            generation: Generation(self.generation(attempt)),
            early: self.plan.early,
            arbiter: None,
        }
    }

    /// Returns the generation that the right has at the source when an attempt begins.
    pub(crate) fn generation(&self, attempt: u32) -> u64 {
        self.generations[attempt as usize - 1]
    }

    // The arbiter.

    /// Asks the arbiter: the question may be lost on its way.
    pub(crate) fn claim(&mut self, side: Side, attempt: u32) {
        let agent = self.host(side).agent;
        if side == Side::A && self.hosts[0].qemu.is_none() {
            // Without the guest's memory nothing is asked.
            let unasked = Item::Claimed(side, attempt, agent, Claimed::Unanswered);
            return self.at(self.now, unasked);
        }
        self.after(1, 200, Item::Claim(side, attempt, agent));
        let limit = match side {
            Side::A => ms(2000),
            Side::B => ms(3000),
        };
        let late = Item::Claimed(side, attempt, agent, Claimed::Unanswered);
        self.at(self.now + limit, late);
    }

    /// The arbiter decides. Its answer may be lost, or come late.
    pub(crate) fn arbitrate(&mut self, side: Side, attempt: u32, agent: u32) {
        if self.now < self.arbiter_down_until || self.rng.one_in(10) {
            return;
        }
        let other = match side {
            Side::A => Side::B,
            Side::B => Side::A,
        };
        let next = self.generation(attempt) + 1;
        let taken =
            self.host(other).leases.contains(&next) && self.variant != Variant::LeaseGivenTwice;
        if !taken {
            self.host(side).leases.insert(next);
        }
        let claimed = match taken {
            true => Claimed::Denied,
            false => Claimed::Granted,
        };
        self.say(|| format!("the arbiter answers {side:?}: {claimed:?}"));
        let long = if self.rng.one_in(5) { 5000 } else { 200 };
        self.after(1, long, Item::Claimed(side, attempt, agent, claimed));
    }

    fn source_config(&self, attempt: u32, restored: bool) -> Config {
        let drains = match self.variant {
            Variant::NoDrainAfterRestart if restored => false,
            _ => self.plan.later != 0,
        };
        Config {
            terms: self.terms(attempt),
            patience: self.plan.patience,
            downtime: match self.variant {
                Variant::PatienceWhileStopped => self.plan.patience,
                _ => self.plan.downtime,
            },
            launch_within: Some(Duration::from_secs(120)),
            verify: self.plan.verify,
            drains,
            arbiter: (self.plan.arbiter && !restored).then_some(STORE),
            requires_arbiter: self.plan.requires_arbiter && !restored,
        }
    }

    fn out(&self, core: Source, attempt: u32) -> Out {
        let tracks = !self.plan.later;
        Out {
            core,
            attempt,
            conn: None,
            dialling: None,
            asking: None,
            verified: false,
            sending: false,
            draining: false,
            tracks: 0,
            dirty: tracks,
            in_flight: Vec::new(),
            frames: 0,
            stopped: false,
            stopping: false,
            announced: false,
            wake: None,
            loading: false,
            begins_with_missing: false,
            goes_on: false,
        }
    }

    pub(crate) fn out_of(&self, attempt: u32) -> Option<usize> {
        self.out.iter().position(|out| out.attempt == attempt)
    }

    // The beginning.

    pub(crate) fn begin(&mut self) {
        let attempt = self.attempts + 1;
        let host = &self.hosts[0];
        let here = host.right.1 == Holder::Here && self.running(Side::A);
        if !host.up || host.reserved.is_some() || !here || self.preparing.is_some() {
            if self.attempts == 0 && self.now < ms(20_000) {
                self.after(100, 1000, Item::Begin);
            }
            return;
        }
        self.attempts = attempt;
        let generation = self.hosts[0].right.0;
        self.generations.push(generation);
        let incarnation = self.hosts[1].incarnation;
        self.a().reserved = Some(attempt);
        if !self.append(
            Side::A,
            attempt,
            &began(self.terms(attempt), longhaul_engine::handover::Side::Source),
        ) {
            if self.hosts[0].up {
                self.a().reserved = None;
                self.a().journals.remove(&attempt);
            }
            return;
        }
        self.a().peers.insert(attempt, incarnation);
        let conn = self.connect(attempt, Some(Epoch(1)));
        self.say(|| format!("A offers attempt {attempt} over connection {conn}"));
        if !self.is_reachable() {
            self.conns[conn as usize].alive = false;
            return self.give_up_preparing(attempt);
        }
        self.preparing = Some((attempt, conn));
        let (agent, at) = (self.hosts[0].agent, self.now + self.plan.offer_delay);
        self.conns[conn as usize].last[1] = at;
        self.transmit(conn, Side::B, Packet::Offer);
        self.after(10_000, 20_000, Item::OfferTimeout(attempt, agent));
    }

    pub(crate) fn give_up_preparing(&mut self, attempt: u32) {
        self.preparing = None;
        self.say(|| format!("A gives up preparing {attempt}"));
        self.restore_out(attempt, false);
    }

    pub(crate) fn launching(&mut self, attempt: u32, conn: u32) {
        self.preparing = None;
        let core = Source::new(self.source_config(attempt, false), self.now);
        let mut out = self.out(core, attempt);
        out.conn = Some(conn);
        out.tracks = !self.plan.later;
        self.out.push(out);
        self.drive_a(attempt);
    }

    pub(crate) fn restore_out(&mut self, attempt: u32, pass_on: bool) {
        let records = self.hosts[0].journals[&attempt].clone();
        let config = self.source_config(attempt, true);
        let epoch = Epoch(1000 * self.hosts[0].agent);
        let core = match pass_on {
            true => Source::pass_on(config, &records, epoch, self.now),
            false => Source::restore(config, &records, epoch, self.now),
        };
        let out = self.out(core, attempt);
        self.out.push(out);
        self.drive_a(attempt);
    }

    // Actions.

    pub(crate) fn tell_a(&mut self, attempt: u32, event: Event) {
        if let Some(n) = self.out_of(attempt) {
            self.say(|| format!("A{attempt} <- {event:?}"));
            self.out[n].core.handle(event, self.now);
            self.drive_a(attempt);
        }
    }

    pub(crate) fn drive_a(&mut self, attempt: u32) {
        let agent = self.hosts[0].agent;
        while let Some(n) = self.out_of(attempt) {
            let Some(action) = self.out[n].core.poll_action() else {
                break;
            };
            self.say(|| format!("A{attempt} -> {action:?}"));
            self.apply_a(n, attempt, action);
            if self.hosts[0].agent != agent || self.failure.is_some() {
                return;
            }
        }
        let Some(n) = self.out_of(attempt) else {
            return;
        };
        self.pump(n);
        let core = &self.out[n].core;
        let early = self.variant == Variant::NameFreedEarly && core.state().keeps_guest();
        let over = core.is_over();
        if (early || over) && self.hosts[0].reserved == Some(attempt) {
            self.a().reserved = None;
            if self.plan.again && self.attempts < 3 {
                self.after(1, 3000, Item::Begin);
            }
        }
        let timeout = self.out[n].core.poll_timeout();
        if let Some(at) = timeout
            && self.out[n]
                .wake
                .is_none_or(|wake| at < wake || wake <= self.now)
        {
            self.out[n].wake = Some(at);
            self.at(at, Item::Wake(Side::A, attempt, agent));
        }
    }

    fn handle_a(&mut self, n: usize, event: Event) {
        self.say(|| format!("  A <- {event:?}"));
        self.out[n].core.handle(event, self.now);
    }

    fn apply_a(&mut self, n: usize, attempt: u32, action: Action) {
        match action {
            Action::Dial {
                epoch,
                any_journals,
            } => {
                let id = self.rng.next() as u32;
                self.out[n].dialling = Some(id);
                self.out[n].asking = None;
                let long = if self.rng.one_in(4) { 5000 } else { 40 };
                self.after(1, long, Item::Dial(attempt, id, epoch, any_journals));
            }
            Action::Hangup => {
                if self.variant != Variant::RedialGoesOn {
                    self.out[n].dialling = None;
                }
                let conns = [self.out[n].conn.take(), self.out[n].asking.take()];
                for conn in conns.into_iter().flatten() {
                    self.close(conn, Side::B);
                }
            }
            Action::Send(message) => {
                if let Some(conn) = self.out[n].conn {
                    self.transmit(conn, Side::B, Packet::ToB(message));
                }
            }
            Action::SendBlocks => {
                let out = &mut self.out[n];
                if let Some(conn) = out.conn {
                    take_back(out);
                    (out.sending, out.announced, out.frames) = (true, false, 0);
                    if out.verified {
                        let verified = Packet::ToB(ToDestination::Verified);
                        self.transmit(conn, Side::B, verified);
                    }
                }
            }
            Action::StopBlocks => {
                take_back(&mut self.out[n]);
                self.out[n].sending = false;
            }
            Action::Drain if self.may_go_on(n) => self.go_on_draining(n),
            Action::Drain => {
                self.keep_memory(attempt);
                let out = &mut self.out[n];
                out.goes_on = false;
                (out.draining, out.sending, out.tracks, out.dirty) = (true, false, 0, 0);
                out.in_flight.clear();
                if self.variant == Variant::RetiredOnCommit {
                    self.retire();
                }
            }
            Action::AskRelease => {
                let refused = self.plan.hook_refuses && self.rng.one_in(2);
                let answer = if refused {
                    Err("a hook".to_owned())
                } else {
                    Ok(())
                };
                self.look_for_arbiter(n);
                self.handle_a(n, Event::MayRelease(answer));
            }
            Action::Write(record) => {
                let written = self.append(Side::A, attempt, &record);
                if self.out.len() > n {
                    self.handle_a(
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
                    Note::InDoubt(generation) => (generation.0, Holder::InDoubt),
                    Note::There(generation) | Note::Conceded(generation) => {
                        (generation.0, Holder::There)
                    }
                    Note::BackHere => (self.generation(attempt), Holder::Here),
                    Note::Here(generation) => (generation.0, Holder::Here),
                };
                let back = note == Note::BackHere;
                let noted = self.note(Side::A, right, back);
                self.handle_a(
                    n,
                    match noted {
                        true => Event::Noted(note),
                        false => Event::NoteFailed(note),
                    },
                );
            }
            Action::Resume => {
                self.a().file = None;
                self.resume_due = None;
                let stopped = self.hosts[0]
                    .qemu
                    .as_ref()
                    .is_some_and(|qemu| !qemu.running);
                if stopped && self.resume_fails > 0 {
                    self.resume_fails -= 1;
                    if self.variant != Variant::ResumeForgotten {
                        self.resume_due = Some(self.now + ms(3000));
                        return self.handle_a(n, Event::ResumeFailed);
                    }
                } else if let Some(qemu) = &mut self.hosts[0].qemu {
                    qemu.running = true;
                    self.held_since = None;
                    self.check();
                }
                self.handle_a(n, Event::Resumed);
            }
            Action::Quit => self.retire(),
            Action::ShowDoubt => {
                if self.variant == Variant::DoubtResumes
                    && let Some(qemu) = &mut self.hosts[0].qemu
                {
                    qemu.running = true;
                    self.check();
                }
            }
            Action::Because(_) => {}
            Action::Claim(_) => self.claim(Side::A, attempt),
            Action::Finish => {
                self.a().journals.remove(&attempt);
                self.out.remove(n);
            }
        }
    }

    fn look_for_arbiter(&mut self, n: usize) {
        let reached = self.now >= self.arbiter_down_until;
        self.handle_a(n, Event::Arbiter(reached));
    }

    /// The source's copy goes.
    pub(crate) fn retire(&mut self) {
        if self.hosts[1].missing | self.hosts[1].unsynced != 0 {
            self.fail("the source's copy goes while blocks are missing");
        }
        if self.running(Side::A) {
            self.fail("a guest that runs is quit");
        }
        self.a().qemu = None;
        self.a().image = false;
        self.a().file = None;
    }

    // What arrives.

    pub(crate) fn dial(&mut self, attempt: u32, id: u32, epoch: Option<Epoch>, any_journals: bool) {
        let n = self.out_of(attempt);
        let wanted = n.is_some_and(|n| self.out[n].dialling == Some(id));
        if !wanted && self.variant != Variant::RedialGoesOn {
            return;
        }
        let agent_same = self.hosts[0].up;
        if !agent_same {
            return;
        }
        let incarnation = self.hosts[0].peers.get(&attempt).copied();
        let known = incarnation.is_none_or(|known| known == self.hosts[1].incarnation);
        let failed = match () {
            () if !self.is_reachable() || self.rng.one_in(20) => Some(DialError::Unreachable),
            () if !known && !any_journals && self.variant != Variant::OtherJournals => {
                Some(DialError::OtherJournals)
            }
            () => None,
        };
        if let Some(error) = failed {
            if wanted {
                self.tell_a(attempt, Event::DialFailed(error));
            }
            return;
        }
        let conn = self.connect(attempt, epoch);
        self.say(|| format!("A{attempt} reaches B over connection {conn}, {epoch:?}"));
        if let Some(n) = n.filter(|_| wanted) {
            match epoch {
                Some(_) => self.out[n].asking = Some(conn),
                None => {
                    self.out[n].conn = Some(conn);
                    let state = None;
                    self.tell_a(attempt, Event::Connected { epoch, state });
                }
            }
        }
        self.called(conn, attempt, epoch);
    }

    pub(crate) fn packet_a(&mut self, conn: u32, packet: Packet) {
        let attempt = self.conns[conn as usize].attempt;
        if self.preparing == Some((attempt, conn)) {
            match packet {
                Packet::Launching => self.launching(attempt, conn),
                Packet::Refused => self.give_up_preparing(attempt),
                _ => {}
            }
            return;
        }
        let Some(n) = self.out_of(attempt) else {
            return;
        };
        if self.out[n].asking == Some(conn) {
            return self.answered(n, attempt, conn, packet);
        }
        if self.out[n].conn != Some(conn) {
            return;
        }
        match packet {
            Packet::ToA(message) => {
                if message == ToSource::Loaded && self.plan.verify {
                    self.out[n].verified = true;
                    self.transmit(conn, Side::B, Packet::ToB(ToDestination::Verified));
                    return self.tell_a(attempt, Event::Verified);
                }
                let Some(message) = FromDestination::of(&message) else {
                    return;
                };
                self.tell_a(attempt, Event::Message(message));
            }
            // The last message of a destination that had the memory: it fetches now.
            Packet::Summary if self.out[n].goes_on => {}
            Packet::Summary if self.out[n].draining => self.tell_a(attempt, Event::Reconnect),
            Packet::Loading => {
                let later = self.plan.later & MEMORY;
                let out = &mut self.out[n];
                if !out.draining && !out.loading {
                    (out.loading, out.dirty) = (true, out.dirty | later);
                    self.pump(n);
                }
            }
            Packet::Accepted => {
                self.tell_a(attempt, Event::Message(FromDestination::Accepted));
            }
            Packet::Ack(epoch, frame) if self.conns[conn as usize].epoch == Some(epoch) => {
                self.out[n].in_flight.retain(|(sent, _)| *sent != frame);
                self.pump(n);
            }
            Packet::Missing(missing) if self.out[n].draining && self.hosts[0].image => {
                let out = &mut self.out[n];
                (out.dirty, out.sending, out.goes_on) = (missing, true, false);
                out.in_flight.clear();
                self.pump(n);
            }
            _ => {}
        }
    }

    /// The answer to Resume.
    fn answered(&mut self, n: usize, attempt: u32, conn: u32, packet: Packet) {
        let take = |out: &mut Out| {
            (out.asking, out.conn, out.dialling) = (None, Some(conn), None);
        };
        let event = match packet {
            Packet::Resumed(state) => {
                take(&mut self.out[n]);
                self.out[n].begins_with_missing = state == AttemptState::Committed;
                let epoch = self.conns[conn as usize].epoch;
                let state = Some(state);
                Event::Connected { epoch, state }
            }
            Packet::ToA(ToSource::Ready { .. }) => {
                take(&mut self.out[n]);
                let state = Some(AttemptState::Ready);
                Event::Connected { epoch: None, state }
            }
            Packet::ToA(message) => {
                let error = match message {
                    ToSource::Aborted { reason, .. } => DialError::Aborted(reason),
                    ToSource::Committed { .. } => DialError::Committed { all_present: false },
                    ToSource::AllPresent { .. } => DialError::Committed { all_present: true },
                    _ => DialError::Unreachable,
                };
                self.out[n].asking = None;
                self.close(conn, Side::B);
                Event::DialFailed(error)
            }
            _ => return,
        };
        self.tell_a(attempt, event);
    }

    pub(crate) fn ended_a(&mut self, conn: u32) {
        let attempt = self.conns[conn as usize].attempt;
        if self.preparing == Some((attempt, conn)) {
            return self.give_up_preparing(attempt);
        }
        let Some(n) = self.out_of(attempt) else {
            return;
        };
        if self.out[n].asking == Some(conn) {
            (self.out[n].asking, self.out[n].dialling) = (None, None);
            self.tell_a(attempt, Event::DialFailed(DialError::Unreachable));
        } else if self.out[n].conn == Some(conn) {
            self.out[n].conn = None;
            self.tell_a(attempt, Event::Lost);
        }
    }

    // Content.

    pub(crate) fn pump(&mut self, n: usize) {
        let Some(conn) = self.out[n].conn else {
            return;
        };
        let Some(epoch) = self.conns[conn as usize].epoch else {
            return;
        };
        while self.out[n].sending && self.out[n].in_flight.len() < WINDOW && self.out[n].dirty != 0
        {
            let block = self.out[n].dirty.trailing_zeros() as u8;
            let version = self.read_a(block);
            let out = &mut self.out[n];
            out.dirty &= !(1 << block);
            let Some(version) = version else {
                if self.variant != Variant::LossUnsaid {
                    self.transmit(conn, Side::B, Packet::Unreadable(block));
                }
                continue;
            };
            out.frames += 1;
            let frame = out.frames;
            out.in_flight.push((frame, block));
            self.transmit(conn, Side::B, Packet::Frame(epoch, frame, block, version));
        }
        let agent = self.hosts[0].agent;
        let later = self.plan.later;
        let out = &mut self.out[n];
        let attempt = out.attempt;
        if out.draining || !out.sending || out.dirty != 0 {
            return;
        }
        if !out.stopped && !out.stopping && out.core.may_stop() {
            out.stopping = true;
            self.after(1, 20, Item::Stop(attempt, agent));
        } else if out.stopped && !out.announced {
            out.announced = true;
            let frames = out.frames;
            self.transmit(conn, Side::B, Packet::Complete(epoch, frames, later));
        }
    }

    pub(crate) fn stop(&mut self, attempt: u32) {
        let Some(n) = self.out_of(attempt) else {
            return;
        };
        self.out[n].stopping = false;
        if !self.out[n].core.may_stop() || self.out[n].dirty != 0 {
            return self.pump(n);
        }
        if let Some(qemu) = &mut self.hosts[0].qemu {
            qemu.running = false;
        }
        self.held_since = Some(self.now);
        self.out[n].stopped = true;
        self.look_for_arbiter(n);
        self.tell_a(attempt, Event::Stopped);
    }

    /// A guest that only this side holds is not stopped for longer than was said.
    pub(crate) fn check_held(&mut self) {
        if let Some(due) = self.resume_due
            && self.now > due
            && self.hosts[0].up
        {
            self.fail("a guest that could not be resumed is not tried again");
        }
        let Some(since) = self.held_since else { return };
        for out in &self.out {
            let lost = out.core.lost_at().filter(|_| out.stopped);
            let Some(lost) = lost.filter(|_| out.core.state().may_abort()) else {
                continue;
            };
            if self.now > lost.max(since + self.plan.downtime) + ms(1500) {
                let text = "the guest is stopped for longer than was said";
                return self.fail(text);
            }
        }
    }

    /// Takes up the journals after a restart.
    pub(crate) fn recover_a(&mut self) {
        let journals: Vec<_> = self.hosts[0].journals.clone().into_iter().collect();
        let released = |records: &[Record]| {
            let mut records = records.iter();
            records.any(Record::is_release)
        };
        let back = |records: &[Record]| {
            let mut records = records.iter();
            records.any(|r| matches!(r, Record::Aborted { .. } | Record::Overruled { .. }))
        };
        for (attempt, records) in &journals {
            let done = matches!(records.last(), Some(Record::Done { .. }));
            if let Some(qemu) = &mut self.hosts[0].qemu
                && done
                && self.variant == Variant::DoneResumes
            {
                qemu.running = true;
                self.check();
            }
            let another = journals
                .iter()
                .any(|(other, records)| other != attempt && released(records) && !back(records));
            let right = self.hosts[0].right;
            let left = right.0 > self.generation(*attempt) && right.1 != Holder::Here;
            let by_another = !released(records) && (another || left);
            let guarded = self.variant != Variant::NameFreedEarly;
            let open = !matches!(records.last(), Some(Record::Closed { .. }));
            if open && guarded {
                self.a().reserved = Some(*attempt);
            }
            self.restore_out(*attempt, by_another && guarded);
            if !self.hosts[0].up {
                return;
            }
        }
    }

    pub(crate) fn done(&self) -> Option<u32> {
        let done = |out: &&Out| *out.core.state() == SourceState::Done;
        self.out.iter().find(done).map(|out| out.attempt)
    }

    pub(crate) fn in_doubt(&self) -> Option<u32> {
        let out = self
            .out
            .iter()
            .find(|out| matches!(out.core.state(), SourceState::Released { .. }))?;
        Some(out.attempt)
    }
}

/// What was not acknowledged is sent again.
fn take_back(out: &mut Out) {
    for (_, block) in std::mem::take(&mut out.in_flight) {
        out.dirty |= 1 << block;
    }
}
