//! One run: the order of events, the faults, and what must hold in the end.

use crate::faults::Fault;
use crate::variant::Variant;
use crate::world::{Holder, Item, Packet, Qemu, Side, World, ms};
use longhaul_attempt::destination;
use longhaul_attempt::source;
use longhaul_engine::handover::{DestinationState, Record};
use std::time::Duration;

/// A run ends here: long after the last fault.
const END: Duration = Duration::from_secs(900);
/// ... or here, where nothing brings the other host back.
const HOPELESS_END: Duration = Duration::from_secs(200);

pub(crate) fn run(seed: u64, variant: Variant, traced: bool) -> World {
    let mut world = World::new(seed, variant, traced);
    let end = if world.plan.hopeless {
        HOPELESS_END
    } else {
        END
    };
    while world.failure.is_none()
        && let Some(item) = world.next()
    {
        if world.now > end {
            break;
        }
        world.check_held();
        world.happen(item);
        world.check();
    }
    if world.failure.is_none() {
        world.check_end();
    }
    world
}

impl World {
    fn happen(&mut self, item: Item) {
        match item {
            Item::Packet(conn, to, packet) => self.packet(conn, to, packet),
            Item::Late(conn, packet) => {
                if self.agent_is(conn, Side::B) {
                    self.packet_b(conn, packet);
                }
            }
            Item::Ended(conn, Side::A) if self.agent_is(conn, Side::A) => self.ended_a(conn),
            Item::Ended(conn, Side::B) if self.agent_is(conn, Side::B) => self.ended_b(conn),
            Item::Ended(..) => {}
            Item::Dial(attempt, id, epoch, any_journals) => {
                self.dial(attempt, id, epoch, any_journals);
            }
            Item::Wake(side, attempt, agent) => self.wake(side, attempt, agent),
            Item::Guest => self.guest(),
            Item::Stop(attempt, agent) if agent == self.hosts[0].agent => self.stop(attempt),
            Item::Stop(..) => {}
            Item::Loaded(attempt, agent) if agent == self.hosts[1].agent => {
                let fails = self.rng.one_in(self.plan.load_fails);
                let loaded = if fails {
                    Err("load".to_owned())
                } else {
                    Ok(())
                };
                self.tell_b(attempt, destination::Event::Loaded(loaded));
            }
            Item::Settled(attempt, agent) if agent == self.hosts[1].agent => {
                let fails = self.rng.one_in(self.plan.load_fails);
                let settled = if fails {
                    Err("sync".to_owned())
                } else {
                    Ok(())
                };
                self.tell_b(attempt, destination::Event::Settled(settled));
            }
            Item::Loaded(..) | Item::Settled(..) => {}
            Item::Synced(blocks) => self.synced(blocks),
            Item::Fault(fault) => self.fault(fault),
            Item::Restart(side) => self.restart(side),
            Item::Begin => self.begin(),
            Item::OfferTimeout(attempt, agent) => {
                let waits = self.preparing.is_some_and(|(of, _)| of == attempt);
                if waits && agent == self.hosts[0].agent {
                    self.give_up_preparing(attempt);
                }
            }
            Item::ExportsEnd(agent) => {
                if agent == self.hosts[1].agent {
                    self.b().exports_left = false;
                }
            }
            Item::Claim(side, attempt, agent) => self.arbitrate(side, attempt, agent),
            Item::Claimed(side, attempt, agent, claimed) => {
                self.claimed(side, attempt, agent, claimed);
            }
            Item::Operator => self.operator(),
            Item::Take(server, agent, conn, frame) => self.take_page(server, agent, conn, frame),
            Item::Place(server, frame) => self.place_page(server, frame),
            Item::ServerGone(server, attempt, agent) if agent == self.hosts[1].agent => {
                self.server_gone(server, attempt);
            }
            Item::ServerGone(..) => {}
            Item::Serve(attempt, agent) if agent == self.hosts[1].agent => self.serve(attempt),
            Item::Serve(..) => {}
            Item::Kept(attempt, agent) if agent == self.hosts[0].agent => self.kept(attempt),
            Item::Kept(..) => {}
            Item::LookAtDrain(attempt, agent) if agent == self.hosts[0].agent => {
                self.look_at_drain(attempt);
            }
            Item::LookAtDrain(..) => {}
            Item::LookAtMemory => self.look_at_memory(),
            Item::Chatter => {
                let conns = self
                    .out
                    .iter()
                    .filter_map(|out| out.conn)
                    .collect::<Vec<_>>();
                for conn in conns {
                    self.transmit(conn, Side::A, Packet::Noise);
                }
                if self.now < ms(20_000) {
                    self.after(10, 100, Item::Chatter);
                }
            }
        }
    }

    fn agent_is(&self, conn: u32, side: Side) -> bool {
        let host = &self.hosts[side as usize];
        host.up && self.conns[conn as usize].agents[side as usize] == host.agent
    }

    fn packet(&mut self, conn: u32, to: Side, packet: Packet) {
        let line = &self.conns[conn as usize];
        // Frames may be in buffers when the connection is cut.
        if !line.alive && matches!(packet, Packet::Frame(..)) {
            return self.after(0, 6000, Item::Late(conn, packet));
        }
        if !line.alive || !self.agent_is(conn, to) {
            return;
        }
        match to {
            Side::A => {
                self.heard_at = self.now;
                self.packet_a(conn, packet);
            }
            Side::B => self.packet_b(conn, packet),
        }
    }

    /// One side ends a connection; the other one notices.
    pub(crate) fn close(&mut self, conn: u32, other: Side) {
        // What was sent before still arrives.
        let time = self.conns[conn as usize].last[other as usize] + ms(1);
        self.at(time, Item::Ended(conn, other));
    }

    fn wake(&mut self, side: Side, attempt: u32, agent: u32) {
        let host = &self.hosts[side as usize];
        if host.agent != agent || !host.up {
            return;
        }
        match side {
            Side::A => {
                let Some(n) = self.out_of(attempt) else {
                    return;
                };
                let starves = self.variant == Variant::TimeoutsStarve;
                if starves && self.now < self.heard_at + ms(200) && self.now > ms(200) {
                    return self.after(10, 50, Item::Wake(side, attempt, agent));
                }
                self.out[n].wake = None;
                self.out[n].core.handle_timeout(self.now);
                self.drive_a(attempt);
            }
            Side::B => {
                let Some(inn) = self.inn.iter_mut().find(|inn| inn.attempt == attempt) else {
                    return;
                };
                inn.wake = None;
                inn.core.handle_timeout(self.now);
                self.drive_b(attempt);
            }
        }
    }

    // Durable storage.

    pub(crate) fn append(&mut self, side: Side, attempt: u32, record: &Record) -> bool {
        let now = self.now;
        let crash_at = self.plan.crash_at;
        let host = self.host(side);
        host.writes += 1;
        let crash = crash_at.filter(|(at, n, _)| *at == side && *n == host.writes);
        if let Some((_, _, false)) = crash {
            self.crash(side);
            return false;
        }
        let host = self.host(side);
        if now < host.write_fails_until && host.write_fails_of == attempt {
            return false;
        }
        host.journals
            .entry(attempt)
            .or_default()
            .push(record.clone());
        if crash.is_some() {
            self.crash(side);
            return false;
        }
        true
    }

    pub(crate) fn note(&mut self, side: Side, right: (u64, Holder), back: bool) -> bool {
        if self.variant == Variant::RightsNotNoted {
            return true;
        }
        let now = self.now;
        let host = self.host(side);
        if now < host.note_fails_until {
            return false;
        }
        if back || right.0 >= host.right.0 {
            // Going back is for the generation that this attempt brought.
            if !back || host.right.0 <= right.0 + 1 {
                host.right = right;
            }
        }
        true
    }

    /// The arbiter's answer reaches the agent that asked, if it is still there.
    fn claimed(&mut self, side: Side, attempt: u32, agent: u32, claimed: source::Claimed) {
        if self.host(side).agent != agent || !self.host(side).up {
            return;
        }
        match side {
            Side::A => {
                let doubt = self.in_doubt() == Some(attempt);
                let back = doubt && claimed == source::Claimed::Granted;
                self.arbitrated[0] += u32::from(back);
                self.tell_a(attempt, source::Event::Claimed(claimed));
            }
            Side::B => self.tell_b(attempt, destination::Event::Claimed(claimed)),
        }
    }

    // Faults.

    pub(crate) fn fault(&mut self, fault: Fault) {
        self.say(|| format!("fault: {fault:?}"));
        let now = self.now;
        match fault {
            Fault::Cut => self.cut_all(),
            Fault::NetworkDown => {
                self.network_up = false;
                self.cut_all();
            }
            Fault::NetworkUp => self.network_up = true,
            Fault::Crash(side) => self.crash(side),
            Fault::PowerCut(side) => self.power_cut(side),
            Fault::Die(side) => self.die(side),
            Fault::LoseJournals => {
                self.crash(Side::B);
                let host = self.b();
                host.journals.clear();
                host.incarnation += 1;
                self.after(60_000, 61_000, Item::Operator);
            }
            Fault::WritesFail(side, long) => {
                let attempt = self.attempts;
                let host = self.host(side);
                (host.write_fails_until, host.write_fails_of) = (now + ms(long), attempt);
            }
            Fault::NotesFail(side, long) => self.host(side).note_fails_until = now + ms(long),
            Fault::Cancel(Side::A) => {
                for attempt in self.out.iter().map(|out| out.attempt).collect::<Vec<_>>() {
                    self.tell_a(attempt, source::Event::GiveUp("cancelled".to_owned()));
                }
            }
            Fault::Cancel(Side::B) => {
                for attempt in self.inn.iter().map(|inn| inn.attempt).collect::<Vec<_>>() {
                    self.tell_b(attempt, destination::Event::GiveUp("cancelled".to_owned()));
                }
            }
            Fault::KillServer => self.kill_server(),
            Fault::KillQemu(side) => self.kill_qemu(side),
            Fault::ArbiterDown(long) => self.arbiter_down_until = now + ms(long),
            Fault::FetchTrouble => {
                for attempt in self.inn.iter().map(|inn| inn.attempt).collect::<Vec<_>>() {
                    self.tell_b(attempt, destination::Event::FetchTrouble);
                }
            }
        }
    }

    fn crash(&mut self, side: Side) {
        let host = self.host(side);
        if !host.up {
            return;
        }
        host.up = false;
        host.agent += 1;
        host.reserved = None;
        host.closed.clear();
        let volatile = match side {
            Side::A => Variant::SourceRecordsVolatile,
            Side::B => Variant::DestinationRecordsVolatile,
        };
        self.say(|| format!("the agent of {side:?} is killed"));
        if self.variant == volatile
            && let Some(records) = self.host(side).journals.values_mut().last()
        {
            records.pop();
        }
        match side {
            Side::A => {
                self.out.clear();
                self.preparing = None;
                (self.held_since, self.resume_due) = (None, None);
            }
            Side::B => self.inn.clear(),
        }
        self.cut_all();
        self.after(10, 3000, Item::Restart(side));
    }

    fn restart(&mut self, side: Side) {
        if self.host(side).dead {
            return;
        }
        self.say(|| format!("the agent of {side:?} starts"));
        let host = self.host(side);
        host.up = true;
        let starts = host.qemu.is_none() && host.right.1 == Holder::Here;
        if side == Side::A && starts && host.journals.is_empty() {
            // The host starts its guests.
            let generation = host.right.0;
            host.qemu = Some(Qemu {
                attempt: 0,
                running: true,
                generation,
                exports: false,
            });
        }
        match side {
            Side::A => self.recover_a(),
            Side::B => self.recover_b(),
        }
    }

    fn power_cut(&mut self, side: Side) {
        if side == Side::A && !self.running(Side::B) {
            // The guest itself would be lost.
            return;
        }
        if side == Side::B {
            let last = |records: &Vec<Record>| records.last().cloned();
            let committed = self.hosts[1].journals.values().any(|records| {
                matches!(
                    last(records),
                    Some(Record::Committed { .. } | Record::Overruled { .. })
                )
            });
            self.guest_dead |= committed || self.running(Side::B);
        }
        let host = self.host(side);
        host.qemu = None;
        host.server = None;
        host.exports_left = false;
        host.missing |= host.unsynced;
        host.unsynced = 0;
        if side == Side::B && !self.hosts[0].image && self.hosts[1].missing != 0 {
            self.fail("blocks are lost with the power of the destination");
        }
        if self.plan.page_ms > 0 {
            self.after(60_000, 61_000, Item::LookAtMemory);
        }
        self.crash(side);
    }

    fn die(&mut self, side: Side) {
        self.crash(side);
        let only = match side {
            Side::A => !self.running(Side::B),
            Side::B => self.running(Side::B),
        };
        let ready = side == Side::A && self.inn.iter().any(|inn| is_ready(inn.core.state()));
        self.guest_dead |= only && !ready && self.running(side);
        let host = self.host(side);
        host.dead = true;
        host.qemu = None;
        host.server = None;
        self.after(60_000, 61_000, Item::Operator);
    }

    /// An operator, who says what is true.
    fn operator(&mut self) {
        // One who finds it undone says it again.
        self.after(10_000, 11_000, Item::Operator);
        if self.hosts[0].dead {
            let ready = self.inn.iter().find(|inn| is_ready(inn.core.state()));
            let next = ready.map(|inn| (inn.attempt, inn.core.terms().next().0));
            let leases = &self.hosts[0].leases;
            if let Some((attempt, _)) = next.filter(|(_, next)| !leases.contains(next)) {
                // What the guest wrote at a host that died later is lost with it.
                self.truth = self.hosts[1].content;
                self.tell_b(attempt, destination::Event::Overrule("dead".to_owned()));
            }
            let fetching = self.inn.iter().find(|inn| inn.core.is_fetching());
            if let Some(attempt) = fetching.map(|inn| inn.attempt) {
                self.tell_b(
                    attempt,
                    destination::Event::GiveUpMissing("dead".to_owned()),
                );
            }
        } else if !self.running(Side::B)
            && let Some(attempt) = self.in_doubt()
        {
            if self.guest_dead {
                // What the guest did at a host that has lost its power and journals is lost.
                self.truth = self.hosts[0].content;
            }
            // Its copy, if there is one, is fenced.
            self.b().qemu = None;
            self.tell_a(attempt, source::Event::Overrule("dead".to_owned()));
        } else if self.hosts[1].dead
            && self.variant != Variant::NoWayBackAfterCommit
            && let Some(attempt) = self.done()
        {
            // What the guest did at the host that died is lost with it.
            self.truth = self.hosts[0].content;
            self.tell_a(attempt, source::Event::Overrule("dead".to_owned()));
        }
    }

    // The end.

    fn check_end(&mut self) {
        if self.plan.hopeless {
            if self.hosts[1].dead && !self.running(Side::A) && self.hosts[0].qemu.is_some() {
                self.fail("the guest runs nowhere");
            }
            // Without its journal nothing can be given up.
            let known = self.hosts[1].incarnation == 1;
            let missing = self.running(Side::B) && self.hosts[1].missing != 0;
            if self.hosts[0].dead && known && missing {
                self.fail("blocks are missing for ever");
            }
            return;
        }
        let running = self.running(Side::A) || self.running(Side::B);
        if !running && !self.guest_dead {
            return self.fail("the guest runs nowhere");
        }
        for (side, name) in [(Side::A, "source"), (Side::B, "destination")] {
            let host = &self.hosts[side as usize];
            if !host.journals.is_empty() {
                let text = format!("a journal stays at the {name}: {:?}", host.journals);
                return self.fail(&text);
            }
            if host.exports_left {
                return self.fail("exports of a guest that is gone are left");
            }
            if host.reserved.is_some() {
                let text = format!("the guest's name is not free at the {name}");
                return self.fail(&text);
            }
        }
        let idle = |qemu: &Option<Qemu>| qemu.as_ref().is_some_and(|qemu| !qemu.running);
        if self.hosts.iter().any(|host| idle(&host.qemu)) {
            return self.fail("a copy that does not run is left");
        }
        let here = if self.running(Side::A) { 0 } else { 1 };
        if running && self.hosts[here].missing != 0 {
            return self.fail("blocks are missing for ever");
        }
        if running && self.hosts[here].right.1 != Holder::Here {
            return self.fail("the guest runs where it has no right to");
        }
        if running && self.hosts[here].content != self.truth {
            self.fail("the guest's content is not what it wrote");
        }
    }
}

fn is_ready(state: &DestinationState) -> bool {
    *state == DestinationState::Ready
}
