//! Fuzzes the interpretation of texts about a guest that something else started: reasons why it
//! cannot be moved, which are safe to show.

use longhaul_hypervisor::attach::reasons;

/// Takes the words of a command line, a file of `-readconfig` and QEMU's networks, each after a
/// zero line.
pub(crate) fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut parts = text.split("\n\0\n");
    let mut part = || parts.next().unwrap_or_default();
    let words: Vec<String> = part().lines().map(str::to_owned).collect();
    let (config, networks) = (part(), part());
    for reason in reasons(&words, config, networks) {
        assert!(!reason.hint.is_empty());
        assert!(!reason.text.chars().any(char::is_control), "{reason:?}");
    }
}
