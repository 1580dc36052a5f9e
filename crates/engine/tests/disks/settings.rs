//! The simulated settings: small guests for every order of events, larger ones for random orders.

use crate::model::Random;
use crate::variant::Variant;
use crate::world::{Adverse, Op, Setting};
use longhaul_engine::strategy::Strategy;

pub(crate) const STRATEGIES: [Strategy; 4] = [
    Strategy::PRECOPY,
    Strategy::hybrid(1),
    Strategy::MIRROR,
    Strategy::POSTCOPY,
];

/// A few blocks, a few requests, and one of every fault.
pub(crate) fn small(variant: Variant) -> Vec<Setting> {
    let setting = |(strategy, eager)| Setting {
        strategy,
        eager,
        variant,
        blocks: 3,
        memory_blocks: 1,
        here: vec![Op::Write(0..8, false), Op::Write(4..12, false)],
        late: vec![Op::Write(16..18, false)],
        there: vec![
            Op::Write(0..8, false),
            Op::Write(10..13, false),
            Op::Flush,
            Op::Read(8..24),
        ],
        depth: 2,
        batch: 2,
        passes: 1,
        adverse: Adverse {
            cuts: 1,
            stragglers: 1,
            deaths: 1,
            power_cuts: 1,
            source_restarts: 1,
            failed_writes: 1,
            failed_syncs: 1,
            source_power_cuts: 1,
            misreads: 0,
        },
    };
    let both = STRATEGIES
        .into_iter()
        .flat_map(|strategy| [(strategy, false), (strategy, true)]);
    both.map(setting).collect()
}

/// Several chunks, with a short one at the end.
pub(crate) fn large(seed: u64, variant: Variant) -> Setting {
    let mut random = Random(seed);
    let strategy = STRATEGIES[random.below(4) as usize];
    let blocks = [5, 64, 130, 200][random.below(4) as usize];
    let memory_blocks = 6;
    let mut ops = |count: u64| -> Vec<Op> {
        let mut ops = Vec::new();
        for _ in 0..random.below(count) {
            let sectors = blocks * 8;
            // Often the same place, so that requests overlap.
            let start = match random.below(3) {
                0 => random.below(sectors),
                _ => random.below(sectors.min(40)),
            };
            let length = [1, 3, 8, 16, 70, 600][random.below(6) as usize];
            let mut range = start..(start + length).min(sectors);
            if random.below(2) == 0 {
                range.start -= range.start % 8;
                range.end = range.end.next_multiple_of(8).min(sectors);
            }
            ops.push(match random.below(12) {
                0..=5 => Op::Write(range, random.below(5) == 0),
                6..=8 => Op::Read(range),
                9 => Op::Discard(range),
                10 => Op::Flush,
                _ => Op::Memory(random.below(memory_blocks)),
            });
        }
        ops
    };
    Setting {
        strategy,
        variant,
        blocks,
        memory_blocks,
        here: ops(20),
        late: vec![],
        there: ops(20),
        depth: 3,
        batch: 16,
        passes: 2,
        eager: seed.is_multiple_of(2),
        adverse: Adverse::default(),
    }
    .with_trouble(&mut Random(seed ^ 0xbad))
}

impl Setting {
    fn with_trouble(mut self, random: &mut Random) -> Self {
        let mut upto = |most: u64| random.below(most + 1) as u32;
        self.adverse = Adverse {
            cuts: upto(3),
            stragglers: upto(3),
            deaths: upto(2),
            power_cuts: upto(1),
            source_restarts: upto(1),
            failed_writes: upto(1),
            misreads: upto(3),
            failed_syncs: upto(1),
            source_power_cuts: upto(1),
        };
        if upto(2) == 0 {
            self.late = vec![Op::Write(1..20, false), Op::Flush];
        }
        self
    }
}
