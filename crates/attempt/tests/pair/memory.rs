//! Memory that follows a guest to its destination, in this world.
//!
//! ```text
//! source's QEMU, or its memory file -> frame -> agent -> page server -> QEMU
//! ```
//!
//! The page server acknowledges a page when it has it. If it is killed, what QEMU has not got from
//! it is missing again.

use crate::faults::Fault;
use crate::variant::Variant;
use crate::world::{
    DISK, Frame, In, Item, MEMORY, MemoryFile, Packet, PageServer, Side, World, ms,
};
use longhaul_attempt::{destination, source};
use std::time::Duration;

/// A source with nothing left to send connects again after this time.
const STUCK_AFTER: Duration = Duration::from_secs(10);

impl World {
    /// Returns whether a block belongs to memory that follows.
    pub(crate) fn is_page(&self, block: u8) -> bool {
        self.plan.later & MEMORY & 1 << block != 0
    }

    /// Returns whether the guest waits for this block.
    pub(crate) fn waits_for(&self, side: Side, block: usize) -> bool {
        self.hosts[side as usize].missing & MEMORY & 1 << block != 0
    }

    // The source.

    /// Reads a block of the guest that was stopped, or still runs.
    pub(crate) fn read_a(&mut self, block: u8) -> Option<u32> {
        let host = &self.hosts[0];
        let (place, bit) = (usize::from(block), 1 << block);
        if DISK & bit != 0 || host.qemu.is_some() {
            return Some(host.content[place]);
        }
        let any = self.variant == Variant::IncompleteFileUsed;
        let file = host.file.as_ref().filter(|file| file.complete || any);
        let version = file.filter(|file| file.blocks & bit != 0)?.content[place];
        self.seen.from_file = true;
        Some(version)
    }

    /// Returns whether the drain uses the connection that the destination had READY on.
    pub(crate) fn may_go_on(&self, n: usize) -> bool {
        let out = &self.out[n];
        let conn = out.conn.map(|conn| &self.conns[conn as usize]);
        let of_blocks = conn.is_some_and(|conn| conn.epoch.is_some());
        let first = !out.draining && out.stopped && !out.begins_with_missing;
        let memory_alone = self.plan.later & DISK == 0 && self.plan.later != 0;
        first && memory_alone && of_blocks && out.sending
    }

    pub(crate) fn go_on_draining(&mut self, n: usize) {
        let attempt = self.out[n].attempt;
        self.keep_memory(attempt);
        let later = self.plan.later;
        let out = &mut self.out[n];
        (out.draining, out.goes_on) = (true, true);
        if !out.loading {
            (out.loading, out.dirty) = (true, out.dirty | later);
        }
        if self.variant == Variant::RetiredOnCommit {
            self.retire();
        }
        let at = self.now + STUCK_AFTER;
        self.at(at, Item::LookAtDrain(attempt, self.hosts[0].agent));
        self.pump(n);
    }

    /// A drain that has sent everything and hears nothing connects again.
    pub(crate) fn look_at_drain(&mut self, attempt: u32) {
        let Some(n) = self.out_of(attempt) else {
            return;
        };
        let out = &self.out[n];
        if !out.goes_on {
            return;
        }
        if out.dirty == 0 && out.in_flight.is_empty() {
            return self.tell_a(attempt, source::Event::Reconnect);
        }
        let at = self.now + STUCK_AFTER;
        self.at(at, Item::LookAtDrain(attempt, self.hosts[0].agent));
    }

    /// Begins to copy memory that follows to its file.
    pub(crate) fn keep_memory(&mut self, attempt: u32) {
        let host = &self.hosts[0];
        let agent = host.agent;
        let file = host.file.as_ref();
        let copies = file.is_some_and(|file| file.complete || file.agent == agent);
        let blocks = self.plan.later & MEMORY;
        if !self.plan.keeps || blocks == 0 || host.qemu.is_none() || copies {
            return;
        }
        let blocks = match self.variant {
            Variant::FileOfMissing => blocks & !self.acknowledged,
            _ => blocks,
        };
        self.a().file = Some(MemoryFile {
            agent,
            blocks,
            content: [0; 8],
            complete: false,
        });
        self.after(1, self.plan.keep_ms, Item::Kept(attempt, agent));
    }

    pub(crate) fn kept(&mut self, attempt: u32) {
        let content = self.hosts[0].content;
        let copies = self.out_of(attempt).is_some() && self.hosts[0].qemu.is_some();
        if let Some(file) = self.a().file.as_mut().filter(|_| copies) {
            (file.content, file.complete) = (content, true);
            self.say(|| "the memory file is complete".to_owned());
        }
    }

    // The destination.

    /// Returns what the destination's agent takes for missing.
    pub(crate) fn lacks(&self, n: usize) -> u8 {
        match self.inn[n].whole {
            true => self.hosts[1].missing & DISK,
            false => self.hosts[1].missing,
        }
    }

    /// Returns what the destination asks its source for; `None` if that is not known.
    pub(crate) fn missing_b(&self, n: usize) -> Option<u8> {
        if self.lacks(n) & MEMORY != 0 && !self.is_served(n) {
            return None;
        }
        let taken = self.hosts[1].server.as_ref();
        let mut missing = self.lacks(n) & !taken.map_or(0, |server| server.taken);
        if self.variant == Variant::AcknowledgedForgotten {
            missing &= !self.acknowledged;
        }
        Some(missing)
    }

    /// QEMU loads the guest: a page server holds its socket if memory is missing.
    pub(crate) fn load_without(&mut self, n: usize) {
        if self.hosts[1].missing & MEMORY == 0 {
            return;
        }
        self.start_server(n);
        if let Some(conn) = self.inn[n].conn {
            self.transmit(conn, Side::A, Packet::Loading);
        }
    }

    fn start_server(&mut self, n: usize) {
        self.servers += 1;
        let number = self.servers;
        self.say(|| format!("page server {number} starts"));
        self.b().server = Some(PageServer { number, taken: 0 });
        self.inn[n].server = Some(number);
    }

    fn is_served(&self, n: usize) -> bool {
        let server = self.hosts[1].server.as_ref().map(|server| server.number);
        server.is_some() && self.inn[n].server == server
    }

    /// Returns whether QEMU takes memory that arrives, or needs none, as far as the agent knows.
    pub(crate) fn listens(&self, n: usize) -> bool {
        self.lacks(n) & MEMORY == 0 || self.inn[n].server.is_some()
    }

    /// Goes on with the memory of a guest that runs now.
    pub(crate) fn fetch_memory(&mut self, n: usize) {
        let attempt = self.inn[n].attempt;
        match self.inn[n].server.filter(|_| !self.is_served(n)) {
            // The attempt has heard that it ended, and could do nothing.
            Some(number) => {
                let agent = self.hosts[1].agent;
                self.at(self.now, Item::ServerGone(number, attempt, agent));
            }
            None => self.serve(attempt),
        }
    }

    /// Connects to the page server of a guest that runs, or starts another one.
    pub(crate) fn serve(&mut self, attempt: u32) {
        let Some(n) = self.in_of(attempt) else { return };
        if !self.inn[n].fetching || self.listens(n) || self.hosts[1].qemu.is_none() {
            return;
        }
        match &self.hosts[1].server {
            Some(server) => self.inn[n].server = Some(server.number),
            None if self.variant == Variant::ServerNotReplaced => {}
            None => {
                self.start_server(n);
                self.seen.replaced = true;
            }
        }
    }

    /// A frame with memory that follows.
    pub(crate) fn page(&mut self, n: usize, conn: u32, frame: Frame) {
        let (_, _, block, _) = frame;
        let agent = self.hosts[1].agent;
        if self.is_served(n) && self.hosts[1].missing & 1 << block != 0 {
            let server = self.servers;
            return self.after(
                1,
                1 + self.plan.page_ms,
                Item::Take(server, agent, conn, frame),
            );
        }
        if self.hosts[1].missing & 1 << block == 0 {
            return self.acknowledge(n, conn, frame);
        }
        self.break_off(n);
    }

    /// What has arrived cannot be given to QEMU.
    fn break_off(&mut self, n: usize) {
        let attempt = self.inn[n].attempt;
        let event = match self.inn[n].fetching {
            true => destination::Event::FetchTrouble,
            false => destination::Event::GiveUp("nothing takes its memory".to_owned()),
        };
        self.tell_b(attempt, event);
    }

    fn acknowledge(&mut self, n: usize, conn: u32, (epoch, number, ..): Frame) {
        if epoch == self.inn[n].epoch && self.inn[n].conn == Some(conn) {
            self.inn[n].applied += 1;
            self.transmit(conn, Side::A, Packet::Ack(epoch, number));
        }
    }

    /// A page reaches the page server, unless one of both has ended before.
    pub(crate) fn take_page(&mut self, server: u32, agent: u32, conn: u32, frame: Frame) {
        let (_, _, block, _) = frame;
        let host = &mut self.hosts[1];
        let (bit, missing) = (1 << block, host.missing);
        if host.agent != agent {
            return;
        }
        let Some(it) = host.server.as_mut().filter(|it| it.number == server) else {
            let n = self.in_of(self.conns[conn as usize].attempt);
            match n.filter(|n| self.inn[*n].conn == Some(conn)) {
                Some(n) if missing & bit == 0 => self.acknowledge(n, conn, frame),
                Some(n) => self.break_off(n),
                None => {}
            }
            return;
        };
        // QEMU gets each page once.
        let again = missing & bit == 0 || it.taken & bit != 0;
        if !again {
            it.taken |= bit;
            self.acknowledged |= bit;
        }
        if let Some(n) = self.in_of(self.conns[conn as usize].attempt) {
            self.acknowledge(n, conn, frame);
        }
        if again {
            return;
        }
        self.after(1, 1 + self.plan.page_ms, Item::Place(server, frame));
        let page = self.pages;
        self.pages += 1;
        let faults = self.plan.page_faults.clone();
        for (_, after, fault) in faults.into_iter().filter(|(of, ..)| *of == page) {
            self.at(self.now + after, Item::Fault(fault));
        }
    }

    /// The page server gives QEMU a page. The agent is not needed.
    pub(crate) fn place_page(&mut self, server: u32, frame: Frame) {
        let (_, _, block, version) = frame;
        let host = &mut self.hosts[1];
        let Some(it) = host.server.as_mut().filter(|it| it.number == server) else {
            return;
        };
        it.taken &= !(1 << block);
        host.missing &= !(1 << block);
        host.content[usize::from(block)] = version;
        if host.missing & MEMORY == 0 {
            host.server = None;
            self.seen.followed = true;
            self.say(|| "QEMU has all memory".to_owned());
        }
        self.may_be_present();
    }

    /// The destination's agent sees that its page server has ended.
    pub(crate) fn server_gone(&mut self, server: u32, attempt: u32) {
        let Some(n) = self.in_of(attempt) else { return };
        if self.inn[n].server != Some(server) || !self.inn[n].fetching {
            return;
        }
        self.inn[n].server = None;
        if self.variant == Variant::ServerEndIsWhole {
            self.inn[n].whole = true;
            return self.may_be_present();
        }
        let agent = self.hosts[1].agent;
        self.at(self.now + ms(1000), Item::Serve(attempt, agent));
        self.tell_b(attempt, destination::Event::FetchTrouble);
    }

    // Faults.

    pub(crate) fn kill_server(&mut self) {
        let Some(server) = self.b().server.take() else {
            return;
        };
        self.tell_of_end(&server);
    }

    fn tell_of_end(&mut self, server: &PageServer) {
        let (number, agent) = (server.number, self.hosts[1].agent);
        let attempts = self.inn.iter().map(|inn| inn.attempt);
        for attempt in attempts.collect::<Vec<_>>() {
            self.after(0, 50, Item::ServerGone(number, attempt, agent));
        }
    }

    /// A QEMU is killed after the handover, while memory follows.
    pub(crate) fn kill_qemu(&mut self, side: Side) {
        if self.hosts[1].missing & MEMORY == 0 || self.hosts[1].qemu.is_none() {
            return;
        }
        if !self.running(Side::B) {
            return self.after(20, 200, Item::Fault(Fault::KillQemu(side)));
        }
        if self.host(side).qemu.take().is_none() {
            return;
        }
        self.say(|| format!("the QEMU of {side:?} is killed"));
        if side == Side::B {
            self.guest_dead = true;
            self.b().exports_left = false;
            if let Some(server) = self.b().server.take() {
                self.tell_of_end(&server);
            }
        }
        self.after(60_000, 61_000, Item::LookAtMemory);
    }

    /// An operator gives up memory that was said to be lost, or that nobody waits for.
    pub(crate) fn look_at_memory(&mut self) {
        self.after(10_000, 11_000, Item::LookAtMemory);
        let ended = self.hosts[1].qemu.is_none();
        let lost = |inn: &&In| inn.core.is_fetching() && (inn.lost || ended);
        let missing = self.hosts[1].missing;
        // Disks would be given up as well. They arrive as long as a QEMU is there.
        if missing & MEMORY == 0 || missing & DISK != 0 && !ended {
            return;
        }
        if let Some(attempt) = self.inn.iter().find(lost).map(|inn| inn.attempt) {
            let lost = "its memory is lost".to_owned();
            self.tell_b(attempt, destination::Event::GiveUpMissing(lost));
        }
    }

    /// Ends a guest whose missing memory is given up.
    pub(crate) fn end_without_memory(&mut self) {
        let missing = self.hosts[1].missing & MEMORY;
        if missing == 0 {
            return;
        }
        self.hosts[1].missing &= DISK;
        self.seen.given_up = true;
        if self.variant == Variant::MemoryZeroed {
            return;
        }
        let a = &self.hosts[0];
        let file = a.file.as_ref();
        let readable = a.qemu.is_some() || file.is_some_and(|file| file.complete);
        if self.running(Side::B) && !a.dead && readable {
            self.fail("memory is given up that can be read");
        }
        self.say(|| "a guest whose memory is lost is ended".to_owned());
        self.guest_dead = true;
        let b = self.b();
        (b.qemu, b.server) = (None, None);
    }
}
