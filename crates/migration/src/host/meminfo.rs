//! The memory of this host.

/// Returns a value of /proc/meminfo, in bytes.
pub fn meminfo(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib = line.strip_prefix(':')?.trim().strip_suffix("kB")?.trim();
    kib.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_what_the_kernel_says() {
        let text = "MemTotal:       24576000 kB\nMemAvailable:   1000 kB\n";
        assert_eq!(meminfo(text, "MemTotal"), Some(24_576_000 * 1024));
        assert_eq!(meminfo(text, "MemAvailable"), Some(1_024_000));
        assert_eq!(meminfo(text, "SwapTotal"), None);
    }
}
