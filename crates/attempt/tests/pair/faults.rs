//! What goes wrong, and when, by seed.

use crate::variant::Variant;
use crate::world::{DISK, Rng, Side, ms};
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
}

/// The parameters of one run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) early: bool,
    pub(crate) verify: bool,
    /// Disk blocks that are only sent after the commit.
    pub(crate) later: u8,
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
        Self {
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
        }
    }
}

fn side(rng: &mut Rng) -> Side {
    match rng.one_in(2) {
        true => Side::A,
        false => Side::B,
    }
}
