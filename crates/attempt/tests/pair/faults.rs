//! What goes wrong, and when, by seed.

use crate::variant::Variant;
use crate::world::{DISK, MEMORY, Rng, Side, ms};
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connections are cut; new ones can be made.
    Cut,
    /// No connection can be made.
    NetworkDown,
    NetworkUp,
    /// The agent is killed, and starts again.
    Crash(Side),
    /// The host loses power, and starts again.
    PowerCut(Side),
    /// The host never returns.
    Die(Side),
    /// The destination's agent is killed, and its journals are lost.
    LoseJournals,
    /// Records cannot be written for a while.
    WritesFail(Side, u64),
    /// Notes of who may run the guest cannot be written for a while.
    NotesFail(Side, u64),
    /// An operator cancels at the source, or at the destination.
    Cancel(Side),
    /// What is fetched cannot be taken for a while.
    FetchTrouble,
    /// The arbiter cannot be asked for a while.
    ArbiterDown(u64),
    /// The page server is killed.
    KillServer,
    /// A QEMU is killed while memory follows.
    KillQemu(Side),
}

/// The parameters of one run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) early: bool,
    pub(crate) verify: bool,
    /// Blocks that are only sent after the commit.
    pub(crate) later: u8,
    /// Memory that follows is copied to a file.
    pub(crate) keeps: bool,
    /// The time that this takes at most.
    pub(crate) keep_ms: u64,
    /// The time that the page server and QEMU each take for a page at most.
    pub(crate) page_ms: u64,
    /// What happens, and how long after the nth page has reached the page server.
    pub(crate) page_faults: Vec<(u32, Duration, Fault)>,
    pub(crate) delay_ms: u64,
    pub(crate) guest_steps: u32,
    pub(crate) patience: Duration,
    pub(crate) downtime: Duration,
    pub(crate) faults: Vec<(Duration, Fault)>,
    /// An agent is killed at its nth record, before or after it is written.
    pub(crate) crash_at: Option<(Side, u32, bool)>,
    /// `cont` at the source fails so often.
    pub(crate) resume_fails: u32,
    /// Of this many loads and syncs, one fails.
    pub(crate) load_fails: u64,
    pub(crate) refuses_cont: bool,
    pub(crate) hook_refuses: bool,
    /// Another attempt begins when one has failed.
    pub(crate) again: bool,
    /// The destination says something all the time.
    pub(crate) chatter: bool,
    /// The offer reaches the destination after this time.
    pub(crate) offer_delay: Duration,
    /// Both hosts agree on an arbiter.
    pub(crate) arbiter: bool,
    /// The guest may only be released to it.
    pub(crate) requires_arbiter: bool,
    /// Nobody can come back: a host died or journals are lost.
    pub(crate) hopeless: bool,
}

impl Plan {
    pub(crate) fn of(rng: &mut Rng, _variant: Variant) -> Self {
        let mut faults = Vec::new();
        let span = 200 + rng.below(4000);
        let time = |rng: &mut Rng| ms(rng.below(span));
        for _ in 0..rng.below(4) {
            let at = time(rng);
            match rng.below(10) {
                0 | 1 => faults.push((at, Fault::Cut)),
                2 => {
                    faults.push((at, Fault::NetworkDown));
                    let long = if rng.one_in(3) { 90_000 } else { 6_000 };
                    faults.push((at + ms(rng.below(long)), Fault::NetworkUp));
                }
                3 => faults.push((at, Fault::Crash(Side::A))),
                4 => faults.push((at, Fault::Crash(Side::B))),
                5 => faults.push((at, Fault::WritesFail(side(rng), 1 + rng.below(20_000)))),
                6 => faults.push((at, Fault::NotesFail(side(rng), 1 + rng.below(20_000)))),
                7 => faults.push((at, Fault::Cancel(side(rng)))),
                8 => faults.push((at, Fault::FetchTrouble)),
                _ => faults.push((at, Fault::ArbiterDown(1 + rng.below(20_000)))),
            }
        }
        let at = time(rng);
        let mut hopeless = false;
        match rng.below(12) {
            0 | 1 => faults.push((at, Fault::PowerCut(side(rng)))),
            2 => {
                faults.push((at, Fault::Die(side(rng))));
                hopeless = true;
            }
            3 => {
                faults.push((at, Fault::LoseJournals));
                hopeless = true;
            }
            _ => {}
        }
        let crash_at = rng
            .one_in(3)
            .then(|| (side(rng), 1 + rng.below(6) as u32, rng.one_in(2)));
        let later = match rng.below(4) {
            0 | 1 => 0,
            2 => DISK,
            _ => (rng.below(16) as u8) << 4,
        };
        let mut plan = Self {
            early: rng.one_in(2),
            verify: rng.one_in(3),
            later,
            delay_ms: 2 + rng.below(60),
            guest_steps: 10 + rng.below(60) as u32,
            patience: ms(1000 + rng.below(20_000)),
            downtime: ms(200 + rng.below(2000)),
            faults,
            crash_at,
            resume_fails: if rng.one_in(5) {
                rng.below(5) as u32
            } else {
                0
            },
            load_fails: if rng.one_in(6) { 2 } else { 1000 },
            refuses_cont: rng.one_in(20),
            hook_refuses: rng.one_in(20),
            again: rng.one_in(2),
            chatter: rng.one_in(8),
            offer_delay: if rng.one_in(8) {
                ms(rng.below(30_000))
            } else {
                ms(1 + rng.below(20))
            },
            // Drawn last: the other parameters of a seed do not depend on it.
            arbiter: rng.one_in(2),
            requires_arbiter: rng.one_in(6),
            hopeless,
            keeps: false,
            keep_ms: 0,
            page_ms: 0,
            page_faults: Vec::new(),
        };
        plan.follow(rng);
        plan
    }

    /// Lets memory follow, in some runs.
    fn follow(&mut self, rng: &mut Rng) {
        if !rng.one_in(3) {
            return;
        }
        self.later |= 1 + rng.below(u64::from(MEMORY)) as u8;
        if rng.one_in(2) {
            self.later &= MEMORY;
        }
        self.keeps = !rng.one_in(3);
        self.keep_ms = [20, 4000][rng.below(2) as usize];
        self.page_ms = [5, 500, 3000][rng.below(3) as usize];
        for _ in 0..rng.below(5) {
            let fault = match rng.below(18) {
                0 | 1 => Fault::Cut,
                2 | 3 => Fault::Crash(Side::A),
                4 | 5 => Fault::Crash(Side::B),
                6..9 => Fault::KillServer,
                9..13 => Fault::KillQemu(Side::A),
                13 => Fault::KillQemu(Side::B),
                14 => Fault::PowerCut(Side::A),
                15 => Fault::PowerCut(Side::B),
                16 => Fault::FetchTrouble,
                _ => Fault::Die(side(rng)),
            };
            self.hopeless |= matches!(fault, Fault::Die(_));
            let page = rng.below(4) as u32;
            let after = ms(if rng.one_in(2) { rng.below(2500) } else { 0 });
            self.page_faults.push((page, after, fault));
        }
    }
}

fn side(rng: &mut Rng) -> Side {
    match rng.one_in(2) {
        true => Side::A,
        false => Side::B,
    }
}
