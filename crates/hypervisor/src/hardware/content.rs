//! Writes the content of small files as text: base64 (RFC 4648, with padding).

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Returns bytes as text.
pub(crate) fn write(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| group.get(at).copied().map_or(0, u32::from);
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for (number, shift) in [18, 12, 6, 0].into_iter().enumerate() {
            let digit = DIGITS.get((bits >> shift & 63) as usize).copied();
            let digit = digit.filter(|_| number <= group.len()).unwrap_or(b'=');
            text.push(char::from(digit));
        }
    }
    text
}

/// Returns the bytes that a text stands for; `None` where it is not in the form of [`write`].
pub(crate) fn read(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| DIGITS.iter().position(|digit| *digit == byte);
    let padding = text.bytes().rev().take_while(|byte| *byte == b'=').count();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let mut bits = 0_u32;
        for at in 0..4 {
            let value = match group.get(at) {
                Some(byte) => digit(*byte)?,
                None => 0,
            };
            bits = bits << 6 | u32::try_from(value).ok()?;
        }
        bytes.extend(bits.to_be_bytes().into_iter().skip(1).take(group.len() - 1));
    }
    // One form for each content.
    (write(&bytes) == text).then_some(bytes)
}

/// Returns the length of the content that a text stands for.
pub(crate) fn length(text: &str) -> usize {
    text.trim_end_matches('=').len() * 3 / 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_content_survives() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"\xff\xfe\x00", "//4A"),
        ] {
            assert_eq!(write(bytes), text);
            assert_eq!(read(text).as_deref(), Some(bytes));
            assert_eq!(length(text), bytes.len());
        }
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(read(&write(&all)), Some(all));
    }

    #[test]
    fn what_is_no_content_is_refused() {
        for text in [
            "Z", "Zg", "Zg=", "Zh==", "Zg==Zg==", "Z,==", "====", "Zm9v\n", "ä===",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
