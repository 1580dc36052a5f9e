//! Applies each possible step to the world.

use crate::machine::{Left, Machine, STORE, send};
use crate::outcome::Outcome;
use crate::step::Step;
use crate::variant::Variant;
use crate::world::{
    ATTEMPTS, Attempt, DESTINATION, Holder, Message, Property, Qemu, SOURCE, Side, Snapshot, World,
};
use longhaul_engine::handover::{
    Commit, DestinationEvent as OnDestination, DestinationState, Record, SourceEvent as OnSource,
    SourceState,
};

impl Machine {
    /// Returns the world after a step; `None` where the step is not possible.
    pub(crate) fn apply(&mut self, world: &World, step: Step) -> Option<World> {
        let mut next = *world;
        let done = match step {
            Step::Act {
                index,
                side,
                ending,
            } => self.act(&mut next, index, side, ending),
            Step::Deliver { bit, again } => self.deliver(&mut next, bit, again),
            Step::Prepare { index, ending } => self.prepare(&mut next, index, ending),
            Step::GiveUp { index } => self.give_up(&mut next, index),
            Step::Reclaim { host } => self.reclaim(&mut next, host),
            Step::Begin { host, arbitrated } => self.ask_for_migration(&mut next, host, arbitrated),
            Step::Claim {
                index,
                side,
                answered,
            } => self.claim(&mut next, index, side, answered),
            Step::Connect { index } => self.connect(&mut next, index),
            Step::Abort { index, side } => self.abort(&mut next, index, side),
            Step::SeeGone { index, side } => self.see_gone(&mut next, index, side),
            Step::Retry { index, side } => self.retry(&mut next, index, side),
            Step::AllPresent { index } => self.all_present(&mut next, index),
            Step::Serve { index } => self.serve(&mut next, index),
            Step::Give { index } => self.give(&mut next, index),
            Step::Place { index } => self.place(&mut next, index),
            Step::Keep { index } => self.keep(&mut next, index),
            Step::SayLost { index } => self.say_lost(&mut next, index),
            Step::KillServer { index } => self.kill_server(&mut next, index),
            Step::Overrule { index, side } => self.overrule(&mut next, index, side),
            Step::Crash { .. }
            | Step::Restart { .. }
            | Step::Lose { .. }
            | Step::Bury { .. }
            | Step::Replace { .. }
            | Step::Forget { .. } => self.fall_or_rise(&mut next, step),
            Step::Stop { index }
            | Step::Converge { index }
            | Step::ShutAndStay { index }
            | Step::ShutAndResume { index }
            | Step::Complete { index } => self.migrate(&mut next, index, step),
            Step::LoseSocket { host } => self.lose_socket(&mut next, host),
            Step::Die { host } | Step::Halt { host } | Step::Boot { host } => {
                self.surprise(&mut next, host, step)
            }
        };
        done?;
        self.settle_memory(&mut next);
        self.check(&mut next);
        Some(next)
    }

    /// Checks the properties of every state.
    fn check(&mut self, world: &mut World) {
        if world.hosts.iter().all(|host| host.qemu.is_live()) {
            world.blame(Property::TwoCopies);
        }
        if !self.fits() {
            world.blame(Property::Capacity);
        }
        self.check_claims(world);
    }

    /// Returns a side whose agent runs and has no action to do.
    fn idle(&self, world: &World, index: usize, side: usize) -> Option<Side> {
        let attempt = &world.attempts[index];
        let host = &world.hosts[attempt.host(side)];
        let it = attempt.sides[side];
        (attempt.begun && host.up && it.todo.is_empty()).then_some(it)
    }

    pub(crate) fn idle_source(&self, world: &World, index: usize) -> Option<(Side, SourceState)> {
        let side = self.idle(world, index, SOURCE)?;
        let state = self.source_state(&side)?.clone();
        Some((side, state))
    }

    pub(crate) fn idle_destination(
        &self,
        world: &World,
        index: usize,
    ) -> Option<(Side, DestinationState)> {
        let side = self.idle(world, index, DESTINATION)?;
        let state = self.destination_state(&side)?.clone();
        Some((side, state))
    }

    fn ask_for_migration(
        &mut self,
        world: &mut World,
        host: usize,
        arbitrated: bool,
    ) -> Option<()> {
        let index = world.begun();
        let it = &world.hosts[host];
        let may = index < self.setting.attempts
            && world.hosts.iter().all(|host| host.up)
            && it.holder == Holder::Here
            && it.qemu.is_live()
            && !self.is_busy(world, host, None);
        may.then(|| self.begin(world, index, host, arbitrated))
    }

    /// Executes a new connection, which begins with the question.
    fn connect(&mut self, world: &mut World, index: usize) -> Option<()> {
        self.idle_source(world, index)?;
        if !world.hosts.iter().all(|host| host.up) {
            return None;
        }
        if self.is_foreign(world, index) {
            return None;
        }
        if self.setting.orderly && world.net & to_destination(index) != 0 {
            return None;
        }
        send(world, index, Message::Ask);
        self.feed_source(world, index, OnSource::Connected);
        Some(())
    }

    /// Whether the source does not connect to the destination: its journals are not those that the
    /// attempt was offered to, and their word would decide.
    fn is_foreign(&self, world: &World, index: usize) -> bool {
        let attempt = &world.attempts[index];
        let destination = &world.hosts[attempt.host(DESTINATION)];
        let [lives, identity] = attempt.offered_to;
        if identity != destination.identity && self.setting.variant != Variant::OtherIdentity {
            return true;
        }
        let source = &attempt.sides[SOURCE];
        let is_peer = |number| matches!(self.records.record(number), Record::Peer { .. });
        let forgot = lives != destination.lives && source.journal.iter().any(is_peer);
        let state = self.source_state(source);
        let keeps_guest = state.is_some_and(SourceState::keeps_guest);
        forgot && !keeps_guest && self.setting.variant != Variant::OtherJournals
    }

    fn abort(&mut self, world: &mut World, index: usize, side: usize) -> Option<()> {
        if side == SOURCE {
            let (_, state) = self.idle_source(world, index)?;
            if !state.may_abort() && !state.in_doubt() {
                return None;
            }
            self.feed_source(world, index, OnSource::Abort(String::new()));
        } else {
            let (_, state) = self.idle_destination(world, index)?;
            if !state.may_abort() {
                return None;
            }
            self.feed_destination(world, index, OnDestination::Abort(String::new()));
        }
        Some(())
    }

    fn see_gone(&mut self, world: &mut World, index: usize, side: usize) -> Option<()> {
        let attempt = &world.attempts[index];
        let qemu = world.hosts[attempt.host(side)].qemu;
        if side == SOURCE {
            let (it, state) = self.idle_source(world, index)?;
            // Everything is at the destination: only it can go on.
            let needed = state.may_abort()
                || state.in_doubt() && self.setting.early && attempt.snapshot == Snapshot::None;
            let gone = !qemu.is_there() || qemu == Qemu::Halted;
            if !it.session || !needed || !gone {
                return None;
            }
            self.feed_source(world, index, OnSource::Abort(String::new()));
        } else {
            let (_, state) = self.idle_destination(world, index)?;
            if !state.may_abort() || qemu.is_there() {
                return None;
            }
            self.feed_destination(world, index, OnDestination::QemuGone);
        }
        Some(())
    }

    fn all_present(&mut self, world: &mut World, index: usize) -> Option<()> {
        let (it, state) = self.idle_destination(world, index)?;
        if state != (DestinationState::Running { all_present: false }) || it.unwritten != 0 {
            return None;
        }
        let source = &world.hosts[world.attempts[index].host(SOURCE)];
        let sends = match self.setting.left {
            Left::Nothing => true,
            Left::Disks => source.up,
            Left::Memory { .. } => self.has_memory(world, index),
        };
        if !sends && self.setting.variant != Variant::GivenUpUnasked {
            return None;
        }
        world.attempts[index].arrived |= sends && !self.setting.follows();
        self.feed_destination(world, index, OnDestination::AllPresent);
        Some(())
    }

    fn has_lease(&self, world: &World, index: usize, side: usize) -> bool {
        let attempt = &world.attempts[index];
        let host = &world.hosts[attempt.host(side)];
        host.leases & 1 << (attempt.generation + 1) != 0
    }

    /// The arbiter gives a lease to the first that asks, and to that one again. The answer may be
    /// lost. A question that comes late is this one; an answer that comes late is that to another
    /// question. The source asks only while its guest is stopped in its QEMU.
    fn claim(
        &mut self,
        world: &mut World,
        index: usize,
        side: usize,
        answered: bool,
    ) -> Option<()> {
        let variant = self.setting.variant;
        if side == SOURCE {
            let (_, state) = self.idle_source(world, index)?;
            let SourceState::Released { arbiter } = state else {
                return None;
            };
            let qemu = world.hosts[world.attempts[index].host(SOURCE)].qemu;
            let here = qemu.is_stopped() || variant == Variant::ClaimedWithoutGuest;
            let asks = arbiter.is_some() || variant == Variant::PlainReleaseClaimed;
            if !here || !asks {
                return None;
            }
        } else {
            let (_, state) = self.idle_destination(world, index)?;
            if !matches!(state, DestinationState::Claiming { .. }) {
                return None;
            }
        }
        let taken = self.has_lease(world, index, side ^ 1) && variant != Variant::GivenTwice;
        let again = self.has_lease(world, index, side);
        if !taken {
            let attempt = &world.attempts[index];
            let (host, generation) = (attempt.host(side), attempt.generation + 1);
            if generation >= 8 {
                world.blame(Property::Capacity);
            }
            world.hosts[host].leases |= 1 << (generation & 7);
        }
        let unheard = variant == Variant::UnansweredTaken && side == SOURCE;
        match (side, answered || unheard) {
            (_, false) if again || taken => return None,
            (_, false) => {}
            (SOURCE, true) if taken && !unheard => return None,
            (SOURCE, true) => self.feed_source(world, index, OnSource::Granted(STORE)),
            (_, true) if taken => self.feed_destination(world, index, OnDestination::Denied(STORE)),
            (_, true) => self.feed_destination(world, index, OnDestination::Granted(STORE)),
        }
        Some(())
    }

    /// Allowed only to an operator whose statement is right: the other host is lost and runs
    /// nothing, and the guest did not go on from there: neither to another attempt, nor because the
    /// arbiter gave it back.
    fn overrule(&mut self, world: &mut World, index: usize, side: usize) -> Option<()> {
        if index + 1 != world.begun() {
            return None;
        }
        let attempt = &world.attempts[index];
        let other = &world.hosts[attempt.host(side ^ 1)];
        if other.up || !other.destroyed || other.qemu.is_there() {
            return None;
        }
        let because = String::new();
        if side == SOURCE {
            let (_, state) = self.idle_source(world, index)?;
            if !matches!(state, SourceState::Released { .. } | SourceState::Done) {
                return None;
            }
            if state == SourceState::Done {
                self.seen.add(match self.setting.follows() {
                    true => Outcome::MemoryTakenBack,
                    false => Outcome::TakenBack,
                });
            }
            world.attempts[index].overruled[SOURCE] = true;
            self.feed_source(world, index, OnSource::Overrule(because));
        } else {
            let (_, state) = self.idle_destination(world, index)?;
            let waits = matches!(
                state,
                DestinationState::Ready | DestinationState::Claiming { .. }
            );
            let given_back = self.has_lease(world, index, SOURCE)
                && self.setting.variant != Variant::OverruledArbiter;
            if !waits || given_back {
                return None;
            }
            world.attempts[index].overruled[DESTINATION] = true;
            self.feed_destination(world, index, OnDestination::Overrule(because));
        }
        Some(())
    }

    /// Gives up what only the source has: allowed to an operator who knows that the source is dead,
    /// or that memory is of no use any more.
    fn give_up(&mut self, world: &mut World, index: usize) -> Option<()> {
        let (it, state) = self.idle_destination(world, index)?;
        let source = &world.hosts[world.attempts[index].host(SOURCE)];
        let dead = !source.up && source.destroyed && !source.qemu.is_there();
        let lost = dead || self.is_lost(world, index);
        let gave_up = |number| matches!(self.records.record(number), Record::GaveUp { .. });
        let decided = it.journal.iter().any(gave_up) || it.unwritten != 0;
        if !self.fetches(&state) || !lost || decided {
            return None;
        }
        self.check_loss(world, index);
        world.attempts[index].arrived = true;
        self.seen.add(match self.setting.follows() {
            true => Outcome::MemoryGivenUp,
            false => Outcome::GivenUp,
        });
        self.feed_destination(world, index, OnDestination::GiveUp(String::new()));
        Some(())
    }

    /// Takes the right back: allowed to an operator who knows that the other host never returns,
    /// and that the guest did not go on from there.
    fn reclaim(&mut self, world: &mut World, host: usize) -> Option<()> {
        let (here, there) = (world.hosts[host], world.hosts[host ^ 1]);
        let asked = there.buried || self.setting.variant == Variant::ReclaimedUnasked;
        let may = here.up
            && asked
            && here.holder == Holder::Elsewhere
            && !here.qemu.is_there()
            && !self.is_busy(world, host, None);
        if !may {
            return None;
        }
        self.seen.add(Outcome::Reclaimed);
        let it = &mut world.hosts[host];
        (it.holder, it.generation) = (Holder::Here, it.generation + 2);
        Some(())
    }

    fn fall_or_rise(&mut self, world: &mut World, step: Step) -> Option<()> {
        match step {
            Step::Crash { host } => {
                if !world.hosts[host].up {
                    return None;
                }
                let left = world.budget.crashes[host].checked_sub(1)?;
                world.budget.crashes[host] = left;
                self.crash(world, host);
            }
            Step::Bury { host } => {
                let it = &mut world.hosts[host];
                if !it.destroyed || it.buried {
                    return None;
                }
                world.budget.buried = world.budget.buried.checked_sub(1)?;
                it.buried = true;
            }
            Step::Lose { host } if !world.hosts[host].buried => {
                world.budget.lost_hosts = world.budget.lost_hosts.checked_sub(1)?;
                self.crash(world, host);
                let it = &mut world.hosts[host];
                it.destroyed = true;
                if it.qemu.is_there() {
                    it.qemu = Qemu::Dead;
                }
                // Its connections are lost with it.
                self.cut(world, host);
            }
            Step::Forget { host } => {
                self.forget(world, host)?;
                world.budget.lost_journals = world.budget.lost_journals.checked_sub(1)?;
            }
            Step::Replace { host } => {
                self.forget(world, host)?;
                world.budget.replaced = world.budget.replaced.checked_sub(1)?;
                let it = &mut world.hosts[host];
                it.identity += 1;
                (it.holder, it.generation) = Default::default();
            }
            Step::Restart { host } if !world.hosts[host].up && !world.hosts[host].buried => {
                world.hosts[host].destroyed = false;
                self.restart(world, host);
            }
            _ => return None,
        }
        Some(())
    }

    /// Loses the journals of a destination whose agent is down.
    fn forget(&self, world: &mut World, host: usize) -> Option<()> {
        let only_destination =
            |attempt: &Attempt| !attempt.begun || usize::from(attempt.from) != host;
        if world.hosts[host].up || !world.attempts.iter().all(only_destination) {
            return None;
        }
        for index in 0..world.begun() {
            let side = &mut world.attempts[index].sides[DESTINATION];
            (side.journal, side.tail) = Default::default();
        }
        world.hosts[host].lives += 1;
        self.cut(world, host);
        Some(())
    }

    /// Returns whether an operator has declared this host dead, and given its guest to the other
    /// one.
    fn is_promised(&self, world: &World, host: usize) -> bool {
        let mut attempts = world.attempts.iter().filter(|attempt| attempt.begun);
        attempts.any(|attempt| attempt.overruled[host ^ usize::from(attempt.from) ^ 1])
    }

    /// Drops the messages on their way to a host.
    fn cut(&self, world: &mut World, host: usize) {
        for bit in 0..ATTEMPTS * Message::ALL.len() {
            let (message, index) = Message::of(bit as u8);
            if world.attempts[index].host(message.to()) == host {
                world.net &= !(1 << bit);
            }
        }
    }

    // The source's QEMU.

    fn migrate(&mut self, world: &mut World, index: usize, step: Step) -> Option<()> {
        let (it, state) = self.idle_source(world, index)?;
        let host = world.attempts[index].host(SOURCE);
        let qemu = world.hosts[host].qemu;
        let snapshot = world.attempts[index].snapshot;
        let destination = &world.attempts[index].sides[DESTINATION];
        let taken = !destination.journal.is_empty() || destination.ended.is_some();
        if !it.session || self.setting.orderly && !taken {
            return None;
        }
        let before = state == SourceState::Here { postmigrate: false };
        match step {
            Step::Stop { .. } if before && qemu.is_live() => {
                world.hosts[host].qemu = Qemu::Frozen;
            }
            Step::Converge { .. } if before && qemu.is_live() => {
                world.hosts[host].qemu = Qemu::Finishing;
            }
            Step::ShutAndStay { .. }
                if before && matches!(qemu, Qemu::Frozen | Qemu::Finishing) =>
            {
                world.hosts[host].qemu = Qemu::Postmigrate;
                self.feed_source(world, index, OnSource::Postmigrate);
            }
            Step::ShutAndResume { .. }
                if before && qemu == Qemu::Finishing && snapshot == Snapshot::None =>
            {
                self.let_live(world, host, self.setting.paused);
            }
            Step::Complete { .. }
                if qemu.is_stopped()
                    && snapshot == Snapshot::None
                    && (state.may_abort() || state.in_doubt()) =>
            {
                world.attempts[index].snapshot = Snapshot::Good;
                send(world, index, Message::Complete);
            }
            _ => return None,
        }
        Some(())
    }

    fn lose_socket(&mut self, world: &mut World, host: usize) -> Option<()> {
        if world.hosts[host].qemu != Qemu::Finishing {
            return None;
        }
        let held = world.attempts.iter().any(|attempt| {
            let source = &attempt.sides[SOURCE];
            let is_here = attempt.begun && usize::from(attempt.from) == host;
            is_here && source.session && !source.unresumed
        });
        if held {
            return None;
        }
        self.seen.add(Outcome::WokeByItself);
        self.let_live(world, host, self.setting.paused);
        Some(())
    }

    fn surprise(&mut self, world: &mut World, host: usize, step: Step) -> Option<()> {
        let it = world.hosts[host];
        match step {
            Step::Die { .. } if it.qemu.is_there() && it.qemu != Qemu::Halted => {
                world.budget.surprises = world.budget.surprises.checked_sub(1)?;
                world.hosts[host].qemu = Qemu::Dead;
            }
            Step::Halt { .. } if it.qemu == Qemu::Running => {
                world.budget.surprises = world.budget.surprises.checked_sub(1)?;
                world.hosts[host].qemu = Qemu::Halted;
            }
            // A host that an operator declared dead starts nothing until it has learned of that.
            Step::Boot { .. }
                if it.up
                    && !self.is_promised(world, host)
                    && it.holder == Holder::Here
                    && matches!(it.qemu, Qemu::None | Qemu::Dead | Qemu::Halted)
                    && !self.is_busy(world, host, None) =>
            {
                world.budget.boots = world.budget.boots.checked_sub(1)?;
                self.let_live(world, host, self.setting.paused);
            }
            _ => return None,
        }
        Some(())
    }

    // Messages.

    fn deliver(&mut self, world: &mut World, bit: u8, again: bool) -> Option<()> {
        if world.net & (1 << bit) == 0 {
            return None;
        }
        let (message, index) = Message::of(bit);
        let side = self.idle(world, index, message.to())?;
        if again {
            world.budget.duplicates = world.budget.duplicates.checked_sub(1)?;
        } else {
            world.net &= !(1 << bit);
        }
        if message.to() == SOURCE {
            if side.state != 0 {
                self.source_hears(world, index, message, &side);
            }
        } else if !self.is_foreign(world, index) {
            self.destination_hears(world, index, message, &side);
        }
        Some(())
    }

    fn source_hears(&mut self, world: &mut World, index: usize, message: Message, side: &Side) {
        let of = self.terms(index, &world.attempts[index]).attempt;
        let state = self.source.state(side.state).clone();
        let event = match message {
            Message::Ready => OnSource::Ready(of),
            Message::Committed => OnSource::Committed(of),
            // It is two events: that of the commit, and then this one.
            Message::AllPresent if matches!(state, SourceState::Released { .. }) => {
                send(world, index, Message::AllPresent);
                OnSource::Committed(of)
            }
            Message::AllPresent => OnSource::AllPresent(of),
            Message::Aborted => OnSource::PeerAborted(of),
            Message::Refused if state.may_abort() || state.in_doubt() => {
                OnSource::Abort(String::new())
            }
            Message::Waiting => return self.source_hears_waiting(world, index, side, &state),
            Message::Closed => {
                if let SourceState::Closed { here } = state {
                    self.remove(world, index, SOURCE, here);
                }
                return;
            }
            _ => return,
        };
        self.feed_source(world, index, event);
    }

    /// The destination waits for blocks: only their sender can send them.
    fn source_hears_waiting(
        &mut self,
        world: &mut World,
        index: usize,
        side: &Side,
        state: &SourceState,
    ) {
        let attempt = &world.attempts[index];
        let stopped = world.hosts[attempt.host(SOURCE)].qemu.is_stopped();
        let open = state.may_abort() || state.in_doubt();
        if side.session && stopped && open && attempt.snapshot == Snapshot::Good {
            send(world, index, Message::Complete);
        } else if state.in_doubt() && !(side.session && stopped) {
            self.seen.add(Outcome::NobodySends);
            self.feed_source(world, index, OnSource::Abort(String::new()));
        }
    }

    fn destination_hears(
        &mut self,
        world: &mut World,
        index: usize,
        message: Message,
        side: &Side,
    ) {
        let terms = self.terms(index, &world.attempts[index]);
        if message == Message::Offer {
            return self.destination_hears_offer(world, index, side);
        }
        let recorded = !side.journal.is_empty() || side.tail != 0;
        if side.state == 0 && !recorded {
            let unknown = self.destination.state_number(DestinationState::Unknown);
            world.attempts[index].sides[DESTINATION].state = unknown;
        }
        let event = match message {
            Message::Complete => {
                let host = world.attempts[index].host(DESTINATION);
                let receiving = matches!(
                    self.destination_state(side),
                    Some(DestinationState::Receiving { .. })
                );
                if !receiving || world.hosts[host].qemu != Qemu::Incoming {
                    return self.go_on(world, index, DESTINATION);
                }
                world.hosts[host].qemu = Qemu::Loaded;
                world.attempts[index].following.served = self.setting.follows();
                OnDestination::Loaded
            }
            Message::Commit | Message::CommitWithLease => {
                let with_lease = message == Message::CommitWithLease;
                let commit = Commit {
                    generation: terms.next(),
                    arbiter: with_lease.then_some(STORE),
                };
                OnDestination::Commit(terms.attempt, commit)
            }
            Message::Cancel => OnDestination::Abort(String::new()),
            Message::Ask => OnDestination::Asked,
            Message::Done => OnDestination::Done,
            Message::Overruled => OnDestination::PeerOverruled(terms.after_next()),
            _ => return,
        };
        if side.state == 0 && recorded {
            let heard = self.destination.event_number(event);
            world.attempts[index].sides[DESTINATION].heard = heard;
            return self.take_up(world, index, DESTINATION);
        }
        self.feed_destination(world, index, event);
    }

    fn destination_hears_offer(&mut self, world: &mut World, index: usize, side: &Side) {
        let attempt = &world.attempts[index];
        let at = attempt.host(DESTINATION);
        let host = &world.hosts[at];
        let known = side.state != 0 || !side.journal.is_empty() || side.tail != 0;
        if known && self.setting.variant != Variant::KnownOfferAccepted {
            return;
        }
        let closed = side.ended.is_some() && self.setting.variant != Variant::ClosedOfferAccepted;
        let refused = closed
            || host.generation > attempt.generation
            || host.qemu.is_there()
            || self.is_busy(world, at, Some(index));
        if refused {
            if !known {
                send(world, index, Message::Refused);
            }
            return;
        }
        self.accept(world, index);
    }
}

/// Returns all messages to the destination of an attempt.
fn to_destination(index: usize) -> u32 {
    let messages = Message::ALL.iter();
    let mine = messages.filter(|message| message.to() == DESTINATION);
    mine.fold(0, |all, message| all | 1 << message.bit(index))
}
