//! Checks and shows names that come from documents.

use crate::limits::NAME_BYTES_MAX;

/// Returns whether a text is a name of a host, site or network: ASCII letters, digits, `.`, `-`
/// and `_`.
pub(crate) fn is_name(text: &str) -> bool {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    !text.is_empty() && text.len() <= NAME_BYTES_MAX && text.bytes().all(good)
}

/// Returns a text that is safe to display: at most 80 characters, control characters escaped.
pub(crate) fn shown(text: &str) -> String {
    let short: String = text.chars().take(80).collect();
    short.escape_debug().to_string()
}

/// Returns the hexadecimal digits of bytes.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
