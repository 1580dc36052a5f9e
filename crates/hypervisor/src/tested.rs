//! The versions of QEMU that Longhaul is tested with, and what to say of a newer one.

/// The first two numbers of the versions between which every `make test` moves guests. Versions between
/// them are not named: what differs between neighbours here is known (docs/qemu-versions.md).
pub const VERSIONS: [(u32, u32); 3] = [(7, 2), (10, 0), (11, 1)];
/// The newest of them.
const NEWEST: (u32, u32) = VERSIONS[VERSIONS.len() - 1];
/// From this third number on a version is what its developers have of the next one.
const DEVELOPED_FROM: u32 = 50;

/// What to say of a QEMU that is newer than all that are tested; of others nothing.
pub fn warning(version: &str, host: &str) -> Option<String> {
    is_newer(version, NEWEST).then(|| {
        let (major, minor) = NEWEST;
        format!(
            "QEMU {version} on {host} is newer than those that Longhaul is tested with (up to \
             {major}.{minor})"
        )
    })
}

/// What to do about one.
pub fn hint(host: &str) -> String {
    format!("on {host}: longhaul doctor --self-test")
}

/// Whether a version is newer than any of that pair of numbers. What is no version is not.
pub fn is_newer(version: &str, newest: (u32, u32)) -> bool {
    let mut numbers = version.split('.').map(|part| part.parse().ok());
    let mut next = || numbers.next().flatten();
    let (Some(major), Some(minor)) = (next(), next()) else {
        return false;
    };
    let developed = next().is_some_and(|micro| micro >= DEVELOPED_FROM);
    (major, minor) > newest || ((major, minor) == newest && developed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_newer_than_all_that_are_tested_is_named() {
        for (version, newer) in [
            ("7.2.22", false),
            ("9.1.0", false),
            ("10.0.2", false),
            ("11.1.0", false),
            ("11.1.3", false),
            ("11.1.50", true),
            ("11.2.0", true),
            ("12.0.1", true),
            ("", false),
            ("unknown", false),
        ] {
            assert_eq!(is_newer(version, (11, 1)), newer, "{version}");
            assert_eq!(warning(version, "paris").is_some(), newer, "{version}");
        }
        assert_eq!(
            warning("12.0.1", "paris").unwrap(),
            "QEMU 12.0.1 on paris is newer than those that Longhaul is tested with (up to 11.1)"
        );
        assert_eq!(hint("paris"), "on paris: longhaul doctor --self-test");
    }

    #[test]
    fn the_versions_are_in_order() {
        assert!(VERSIONS.is_sorted());
    }
}
