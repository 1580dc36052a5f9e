//! Memory that follows: a guest that runs at the destination while its source has pages that QEMU
//! there lacks.
//!
//! One page stands for all of them. It is at the source; then with the page server, of which the
//! source was told; then with QEMU. The page server outlives the agent. If it is killed, what QEMU
//! has not got from it is missing again.

use crate::machine::Machine;
use crate::outcome::Outcome;
use crate::variant::Variant;
use crate::world::{DESTINATION, Page, Property, Qemu, SOURCE, World};
use longhaul_engine::handover::SourceState;

impl Machine {
    /// Returns whether the destination's agent takes the memory for complete: QEMU has it.
    pub(crate) fn has_memory(&self, world: &World, index: usize) -> bool {
        let following = world.attempts[index].following;
        let ended = self.setting.variant == Variant::ServerEndIsWhole && !following.served;
        following.page == Page::Placed || ended
    }

    /// Returns whether something is missing that nobody has given up.
    pub(crate) fn misses(&self, world: &World, index: usize) -> bool {
        let attempt = &world.attempts[index];
        let runs = world.hosts[attempt.host(DESTINATION)].qemu.is_live();
        if self.setting.follows() && attempt.following.page != Page::Placed {
            // A guest cannot go on without its memory.
            return !attempt.arrived || runs;
        }
        self.setting.drains() && !self.setting.follows() && !attempt.arrived
    }

    /// Returns whether an operator may give up missing memory: it was said to be lost, or the QEMU
    /// that lacks it has ended, or an operator let the guest run here because its source was dead.
    /// An operator who has taken the guest back does not.
    pub(crate) fn is_lost(&self, world: &World, index: usize) -> bool {
        let attempt = &world.attempts[index];
        let qemu = world.hosts[attempt.host(DESTINATION)].qemu;
        let [taken_back, without_source] = attempt.overruled;
        let is_of_no_use = attempt.following.lost || !qemu.is_there() || without_source;
        self.setting.follows() && is_of_no_use && !taken_back
    }

    /// Finds memory that is given up although the guest could go on with it.
    pub(crate) fn check_loss(&self, world: &mut World, index: usize) {
        let attempt = &world.attempts[index];
        let source = &world.hosts[attempt.host(SOURCE)];
        let runs = world.hosts[attempt.host(DESTINATION)].qemu.is_live();
        let following = attempt.following;
        let has = match following.page {
            Page::Left => source.qemu.is_stopped() || following.kept && !source.destroyed,
            Page::Given | Page::Placed | Page::Forgotten => false,
        };
        if self.setting.follows() && runs && has {
            world.blame(Property::FalseLoss);
        }
    }

    /// Ends the guest whose missing memory was given up.
    pub(crate) fn end_without_memory(&self, world: &mut World, index: usize) {
        let attempt = &world.attempts[index];
        let qemu = &mut world.hosts[attempt.host(DESTINATION)].qemu;
        let lacks = self.setting.follows() && attempt.following.page != Page::Placed;
        if lacks && qemu.is_there() && self.setting.variant != Variant::MemoryZeroed {
            *qemu = Qemu::Dead;
        }
    }

    /// Removes what a restarted source has no use for.
    pub(crate) fn sweep_file(&self, world: &mut World, index: usize) {
        let attempt = &mut world.attempts[index];
        if self.setting.variant == Variant::FileSwept && attempt.following.kept {
            attempt.following.kept = false;
            world.blame(Property::RetiredEarly);
        }
    }

    /// Ends page servers that have nothing to do.
    pub(crate) fn settle_memory(&self, world: &mut World) {
        if !self.setting.follows() {
            return;
        }
        for index in 0..world.begun() {
            let attempt = &mut world.attempts[index];
            let qemu = world.hosts[attempt.host(DESTINATION)].qemu;
            let following = &mut attempt.following;
            following.served &= qemu.is_there() && following.page != Page::Placed;
            following.lost &= following.page == Page::Left;
        }
    }

    /// Returns whether the guest runs at the destination, whose agent fetches its memory.
    fn fetches_memory(&self, world: &World, index: usize) -> bool {
        let destination = self.idle_destination(world, index);
        let fetches = destination.is_some_and(|(_, state)| self.fetches(&state));
        fetches && self.setting.follows()
    }

    /// Returns whether the source sends memory.
    fn sends_memory(&self, world: &World, index: usize) -> bool {
        let source = self.idle_source(world, index);
        source.is_some_and(|(_, state)| matches!(state, SourceState::Finishing | SourceState::Done))
    }

    /// Returns whether QEMU lies stopped at the source, with the guest's memory.
    fn lies_stopped(&self, world: &World, index: usize) -> bool {
        world.hosts[world.attempts[index].host(SOURCE)]
            .qemu
            .is_stopped()
    }

    /// Starts a new page server, which learns from QEMU what is missing.
    pub(crate) fn serve(&mut self, world: &mut World, index: usize) -> Option<()> {
        let attempt = &world.attempts[index];
        let qemu = world.hosts[attempt.host(DESTINATION)].qemu;
        let paused = !attempt.following.served && attempt.following.page != Page::Placed;
        if !paused || !qemu.is_there() || !self.fetches_memory(world, index) {
            return None;
        }
        self.seen.add(Outcome::ServedAgain);
        world.attempts[index].following.served = true;
        Some(())
    }

    /// Sends the page from the stopped QEMU; if that has ended, from the complete memory file.
    pub(crate) fn give(&mut self, world: &mut World, index: usize) -> Option<()> {
        let following = world.attempts[index].following;
        let misses = following.served && following.page == Page::Left;
        if !misses || !self.sends_memory(world, index) || !self.fetches_memory(world, index) {
            return None;
        }
        let mut is_good = true;
        if !self.lies_stopped(world, index) {
            let uses = following.kept || self.setting.variant == Variant::IncompleteFileUsed;
            if !uses || self.setting.variant == Variant::FileNotOpened {
                return None;
            }
            is_good = following.kept && !following.hollow;
            self.seen.add(Outcome::ReadFromFile);
        }
        world.attempts[index].following.page = Page::Given;
        if !is_good {
            world.blame(Property::LostWrites);
        }
        Some(())
    }

    /// Gives QEMU the page. Neither agent is needed.
    pub(crate) fn place(&mut self, world: &mut World, index: usize) -> Option<()> {
        let following = &mut world.attempts[index].following;
        if !following.served || following.page != Page::Given {
            return None;
        }
        following.page = Page::Placed;
        self.seen.add(Outcome::MemoryFollowed);
        Some(())
    }

    /// Completes the memory file: it has all that was missing when the guest was handed over.
    pub(crate) fn keep(&mut self, world: &mut World, index: usize) -> Option<()> {
        let sends = self.sends_memory(world, index) && self.lies_stopped(world, index);
        let following = &mut world.attempts[index].following;
        if !sends || following.kept {
            return None;
        }
        following.kept = true;
        let misses = following.page == Page::Left;
        following.hollow = self.setting.variant == Variant::FileOfMissing && !misses;
        Some(())
    }

    /// The source cannot read what the destination asks for, and says so.
    pub(crate) fn say_lost(&mut self, world: &mut World, index: usize) -> Option<()> {
        let following = world.attempts[index].following;
        let asked = following.page == Page::Left && !following.lost;
        let kept = following.kept && self.setting.variant != Variant::FileNotOpened;
        let says = asked && !kept && !self.lies_stopped(world, index);
        let both = self.sends_memory(world, index) && self.fetches_memory(world, index);
        if !says || !both || self.setting.variant == Variant::LossUnsaid {
            return None;
        }
        self.seen.add(Outcome::SaidLost);
        world.attempts[index].following.lost = true;
        if following.kept {
            world.blame(Property::FalseLoss);
        }
        Some(())
    }

    pub(crate) fn kill_server(&mut self, world: &mut World, index: usize) -> Option<()> {
        let left = world.budget.servers.checked_sub(1)?;
        let following = &mut world.attempts[index].following;
        if !following.served {
            return None;
        }
        following.served = false;
        if following.page == Page::Given {
            following.page = match self.setting.variant {
                Variant::AcknowledgedForgotten => Page::Forgotten,
                _ => Page::Left,
            };
        }
        world.budget.servers = left;
        Some(())
    }
}
