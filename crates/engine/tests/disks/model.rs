//! The contents that a disk may have as its guest knows it: after a power cut any write since the
//! last flush, otherwise the last completed write.

/// Eight sectors of 512 bytes, each a number instead of its bytes.
pub(crate) type Block = [u16; 8];
pub(crate) const SECTORS: u64 = 8;
pub(crate) const SECTOR_BYTES: u64 = 512;

#[derive(Debug, Clone)]
struct Entry {
    op: u64,
    /// `None`: discarded, with any content.
    value: Option<u16>,
    done_at: Option<u64>,
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    sectors: Vec<Vec<Entry>>,
    clock: u64,
}

impl Model {
    pub(crate) fn new(blocks: u64, value: impl Fn(u64) -> u16) -> Self {
        let first = |sector| Entry {
            op: 0,
            value: Some(value(sector / SECTORS)),
            done_at: Some(0),
        };
        Self {
            sectors: (0..blocks * SECTORS).map(|s| vec![first(s)]).collect(),
            clock: 0,
        }
    }

    pub(crate) fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(crate) fn begin(&mut self, op: u64, sectors: std::ops::Range<u64>, value: Option<u16>) {
        for sector in sectors {
            self.sectors[sector as usize].push(Entry {
                op,
                value,
                done_at: None,
            });
        }
    }

    pub(crate) fn done(&mut self, op: u64) {
        let now = self.now();
        for entry in self.sectors.iter_mut().flatten().filter(|e| e.op == op) {
            entry.done_at = Some(now);
        }
    }

    /// Records that a flush requested at that time has completed: older versions are gone for good.
    pub(crate) fn flushed(&mut self, asked_at: u64) {
        for entries in &mut self.sectors {
            let sure = |e: &Entry| e.done_at.is_some_and(|at| at <= asked_at);
            if let Some(last) = entries.iter().rposition(sure) {
                entries.drain(..last);
            }
        }
    }

    /// Returns whether a sector may hold this value, with or without a power cut since it was
    /// written.
    pub(crate) fn allows(&self, sector: u64, value: u16, power_cut: bool) -> bool {
        let entries = &self.sectors[sector as usize];
        let last = entries.iter().rposition(|e| e.done_at.is_some());
        let from = if power_cut { 0 } else { last.unwrap_or(0) };
        let mut may = entries[from..].iter();
        may.any(|entry| entry.value.is_none_or(|v| v == value))
    }

    pub(crate) fn tell(&self, sector: u64) -> String {
        format!("{:?}", self.sectors[sector as usize])
    }
}

/// A deterministic sequence of numbers.
#[derive(Debug, Clone)]
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}
