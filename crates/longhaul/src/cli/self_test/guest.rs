//! The guest of the self-test: a firmware that checks its own memory, and what it says of it.

use longhaul_hypervisor::Qmp;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use std::path::Path;
use std::time::Duration;

/// `guest.S`, assembled.
const CODE: &[u8] = include_bytes!("guest.bin");
const IMAGE_BYTES: usize = 0x10000;
/// Where in the image the code begins, and where the processor does.
const CODE_PLACE: usize = 0xf000;
const RESET_PLACE: usize = 0xfff0;
/// What stands at the place of its findings once it checks.
const NAME: u32 = 0x5453_484c;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// What the guest has found so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Findings {
    /// Whether it has come to checking.
    pub(super) checks: bool,
    /// How often it went over its memory.
    pub(super) passes: u32,
    /// Words that were not what it wrote there last.
    pub(super) errors: u32,
    /// The first of them: where, what was to be there, and what was.
    pub(super) first: (u32, u32, u32),
}

/// The firmware.
pub(super) fn image() -> Vec<u8> {
    let mut image = vec![0; IMAGE_BYTES];
    image[CODE_PLACE..CODE_PLACE + CODE.len()].copy_from_slice(CODE);
    // jmp to the code
    let back = (0x10000 + CODE_PLACE - (RESET_PLACE + 3)) as u16;
    image[RESET_PLACE] = 0xe9;
    image[RESET_PLACE + 1..RESET_PLACE + 3].copy_from_slice(&back.to_le_bytes());
    image
}

/// Asks the guest's QEMU for them.
pub(super) async fn findings(socket: &Path) -> Result<Findings, String> {
    let qmp = Qmp::connect(socket, CONNECT_TIMEOUT)
        .await
        .map_err(|error| error.to_string())?;
    let look = serde_json::json!({ "command-line": "xp /6wx 0x8000" });
    let answer = qmp.execute("human-monitor-command", look, COMMAND_TIMEOUT);
    let answer = answer.await.map_err(|error| error.to_string())?;
    let text = answer.as_str().unwrap_or_default();
    parse(text).ok_or_else(|| format!("QEMU shows the guest's memory as {text:?}"))
}

fn parse(text: &str) -> Option<Findings> {
    let words: Vec<u32> = text
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("0x"))
        .map(|word| u32::from_str_radix(word, 16).ok())
        .collect::<Option<_>>()?;
    let [name, passes, errors, place, wanted, found] = words[..] else {
        return None;
    };
    Some(Findings {
        checks: name == NAME,
        passes,
        errors,
        first: (place, wanted, found),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_shows_is_read() {
        let text = "0000000000008000: 0x5453484c 0x00000486 0x00000001 0x00100000\r\n\
                    0000000000008010: 0x00000002 0x00000003\r\n";
        let expected = Findings {
            checks: true,
            passes: 0x486,
            errors: 1,
            first: (0x10_0000, 2, 3),
        };
        assert_eq!(parse(text), Some(expected));
        assert_eq!(parse("Cannot access memory\r\n"), None);
    }

    #[test]
    fn the_processor_begins_with_the_code() {
        let image = image();
        assert_eq!(image[RESET_PLACE..RESET_PLACE + 3], [0xe9, 0x0d, 0xf0]);
        assert_eq!(image[CODE_PLACE], 0xfa, "cli");
    }
}
