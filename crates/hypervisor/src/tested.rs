//! Lists the versions of QEMU that Longhaul is tested with, the warning about newer ones, and two
//! known incompatible ones.

/// The first two numbers of the versions between which every `make test` moves guests. Versions
/// between them are not listed: the differences between neighbours here are known
/// (docs/qemu-versions.md).
pub const VERSIONS: [(u32, u32); 3] = [(7, 2), (10, 0), (11, 1)];
/// The newest of them.
const NEWEST: (u32, u32) = VERSIONS[VERSIONS.len() - 1];
/// The third number from which on a version is a development version of the next one.
const DEVELOPED_FROM: u32 = 50;

/// Returns the warning about a QEMU that is newer than all tested ones; `None` for others.
pub fn warning(version: &str, host: &str) -> Option<String> {
    is_newer(version, NEWEST).then(|| {
        let (major, minor) = NEWEST;
        format!(
            "QEMU {version} on {host} is newer than those that Longhaul is tested with (up to \
             {major}.{minor})"
        )
    })
}

/// Returns the advice about one.
pub fn hint(host: &str) -> String {
    format!("on {host}: longhaul doctor --self-test")
}

/// A release whose virtio queues all have 1024 entries, whatever their devices request.
const LARGE_QUEUES: &str = "10.0.13";
/// The first version of QEMU that does not load queues larger than its own.
const CHECKS_QUEUES: (u32, u32) = (11, 1);

/// Returns why a guest with virtio devices, run by one QEMU, is not loaded by another; `None` for
/// pairs without a known fault.
pub fn does_not_load(from: &str, to: &str) -> Option<String> {
    let (major, minor) = numbers(to)?;
    (from == LARGE_QUEUES && (major, minor) >= CHECKS_QUEUES).then(|| {
        format!(
            "QEMU {to} does not load virtio devices of QEMU {from}, which gives their queues 1024 \
             entries"
        )
    })
}

/// Models whose state QEMU moves from a version on, and what to use with an older one.
const MOVES_SINCE: [(&str, (u32, u32), &str); 1] =
    [("nvme", (11, 1), "use virtio-blk-pci or virtio-scsi-pci")];

/// Returns why QEMU of a version cannot move a device of a model, and what to do; `None` if it can.
pub(crate) fn stays(kind: &str, version: &str) -> Option<(String, &'static str)> {
    let (_, since, hint) = MOVES_SINCE.iter().find(|(model, ..)| *model == kind)?;
    let is_older = numbers(version).is_some_and(|version| version < *since);
    is_older.then(|| {
        let (major, minor) = since;
        (
            format!("QEMU {version} cannot move its state; QEMU {major}.{minor} can"),
            *hint,
        )
    })
}

/// Returns the first two numbers of a version.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Returns whether a version is newer than any of that pair of numbers. A text that is not a
/// version is not.
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
    fn two_that_do_not_understand_each_other_are_named() {
        for (from, to, loads) in [
            ("10.0.13", "11.1.3", false),
            ("10.0.13", "12.0.0", false),
            ("10.0.13", "10.0.13", true),
            ("10.0.13", "10.0.2", true),
            ("10.0.13", "11.0.1", true),
            ("10.0.2", "11.1.3", true),
            ("10.0.12", "11.1.3", true),
            ("11.1.3", "11.1.3", true),
            ("10.0.13", "", true),
        ] {
            assert_eq!(does_not_load(from, to).is_none(), loads, "{from} {to}");
        }
    }

    #[test]
    fn models_that_a_version_does_not_move_are_named() {
        for (kind, version, stays_there) in [
            ("nvme", "7.2.22", true),
            ("nvme", "10.0.13", true),
            ("nvme", "11.1.0", false),
            ("nvme", "12.0.0", false),
            ("pvscsi", "7.2.22", false),
        ] {
            assert_eq!(
                stays(kind, version).is_some(),
                stays_there,
                "{kind} {version}"
            );
        }
        assert_eq!(
            stays("nvme", "10.0.13").unwrap().0,
            "QEMU 10.0.13 cannot move its state; QEMU 11.1 can"
        );
    }

    #[test]
    fn the_versions_are_in_order() {
        assert!(VERSIONS.is_sorted());
    }
}
