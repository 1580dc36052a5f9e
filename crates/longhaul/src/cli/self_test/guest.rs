//! Implements the guest of the self-test: a firmware that checks its own memory, and its findings.

use longhaul_hypervisor::Qmp;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use std::path::Path;
use std::time::Duration;

/// `guest.S`, assembled.
const CODE: &[u8] = include_bytes!("guest.bin");
const IMAGE_BYTES: usize = 0x10000;
/// The offset of the code in the image, and that of the reset vector.
const CODE_PLACE: usize = 0xf000;
const RESET_PLACE: usize = 0xfff0;
/// The magic number at the place of its findings once it checks.
const NAME: u32 = 0x5453_484c;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// The guest's findings so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Findings {
    /// Whether it has begun to check.
    pub(super) checks: bool,
    /// The number of passes over its memory.
    pub(super) passes: u32,
    /// The number of words that differed from the last write.
    pub(super) errors: u32,
    /// The first of them: address, expected value, found value.
    pub(super) first: (u32, u32, u32),
}

/// Returns the firmware.
pub(super) fn image() -> Vec<u8> {
    let mut image = vec![0; IMAGE_BYTES];
    image[CODE_PLACE..CODE_PLACE + CODE.len()].copy_from_slice(CODE);
    // jmp to the code
    let back = (0x10000 + CODE_PLACE - (RESET_PLACE + 3)) as u16;
    image[RESET_PLACE] = 0xe9;
    image[RESET_PLACE + 1..RESET_PLACE + 3].copy_from_slice(&back.to_le_bytes());
    image
}

/// Reads the findings through the guest's QEMU.
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
