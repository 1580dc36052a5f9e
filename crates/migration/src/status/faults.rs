//! The pages that a guest waited for, in the report.

use longhaul_api::{FaultReport, Report};
use longhaul_protocol::message::Faults;
use longhaul_protocol::{BLOCK_SIZE, RegionSpec};

/// Adds the waits of a guest with this memory to a report.
pub(crate) fn report(faults: &Faults, memory: &[RegionSpec], report: &mut Report) {
    let blocks: u64 = memory.iter().map(|spec| spec.blocks).sum();
    let gib = blocks as f64 * BLOCK_SIZE as f64 / (1_u64 << 30) as f64;
    let [above_10_ms, above_100_ms, above_1000_ms] = faults.longer;
    let ms = |time_us: u64| time_us as f64 / 1e3;
    report.faults = Some(FaultReport {
        pages: faults.pages,
        pages_per_gib: if gib > 0.0 {
            faults.pages as f64 / gib
        } else {
            0.0
        },
        median_ms: ms(faults.median_us),
        p99_ms: ms(faults.p99_us),
        longest_ms: ms(faults.longest_us),
        above_10_ms: Some(above_10_ms),
        above_100_ms: Some(above_100_ms),
        above_1000_ms: Some(above_1000_ms),
    });
}
