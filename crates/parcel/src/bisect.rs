//! Finds the end of what was written to a device.

/// The number of successive cells in a probe. A gap that is shorter does not hide the end.
pub(crate) const PROBES: u64 = 256;

/// Returns the number of cells up to the last valid one, if `is_valid` tells which are, and there
/// is none after the first run of `PROBES` others. Each bisection probes a run.
pub(crate) fn end<E>(
    capacity: u64,
    mut is_valid: impl FnMut(u64) -> Result<bool, E>,
) -> Result<u64, E> {
    // All before `low` counts as written, nothing from `high` on is.
    let (mut low, mut high) = (0, capacity);
    while low < high {
        let middle = low + (high - low) / 2;
        let mut last = None;
        for at in middle..high.min(middle + PROBES) {
            if is_valid(at)? {
                last = Some(at);
            }
        }
        match last {
            Some(at) => low = at + 1,
            None => high = middle,
        }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_found_beyond_damaged_cells() {
        for capacity in [0, 1, 2, 100, 1 << 30] {
            for written in [0, 1, 2, 57, 99, 100, 12_345, 1 << 30] {
                let written = written.min(capacity);
                let damaged = |at: u64| at % 7 == 3 && at + 1 < written;
                let found = end(capacity, |at| Ok::<_, ()>(at < written && !damaged(at)));
                assert_eq!(found, Ok(written), "{capacity}");
            }
        }
    }
}
