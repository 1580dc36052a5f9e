//! Identifiers, in binary form and as text.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A host's identity: the BLAKE3 hash of its public key (SubjectPublicKeyInfo, DER).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostId(pub [u8; 32]);

/// Identifies the journals of a host from their creation to their loss. A host that has lost them
/// gets another one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub [u8; INCARNATION_BYTES]);

/// Length of an [`Incarnation`], in bytes.
pub const INCARNATION_BYTES: usize = 16;

/// Identifies the lease store of an arbiter from its creation to its loss. A store that was
/// restored from a backup gets another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct StoreId(pub [u8; 16]);

/// Identifies one migration of one guest, permanently.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct MigrationId(pub [u8; 8]);

/// The number of an attempt of one migration, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt(pub u32);

/// Identifies one attempt of one migration. Messages carry its fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttemptId {
    /// The migration.
    pub migration: MigrationId,
    /// Its attempt.
    pub attempt: Attempt,
}

/// The number of a connection of one attempt, from 1: data of an older connection is void.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch(pub u32);

/// Counts how often the right to run a guest has changed hosts.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
pub struct Generation(pub u64);

/// A text that is not a valid identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct ParseIdError {
    text: String,
    expected: &'static str,
}

fn write_hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

fn read_hex<const N: usize>(text: &str, expected: &'static str) -> Result<[u8; N], ParseIdError> {
    let error = || ParseIdError {
        text: text.chars().take(80).collect(),
        expected,
    };
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    if digits.len() != 2 * N {
        return Err(error());
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| error())?;
        if pair.starts_with('+') {
            return Err(error());
        }
        *byte = u8::from_str_radix(pair, 16).map_err(|_| error())?;
    }
    Ok(bytes)
}

/// A fingerprint in the form that people compare: 16 groups of 4 hexadecimal digits, joined by `-`.
impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, pair) in self.0.chunks(2).enumerate() {
            if index > 0 {
                f.write_str("-")?;
            }
            write_hex(pair, f)?;
        }
        Ok(())
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0[..4], f)
    }
}

impl FromStr for HostId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        read_hex(text, "a host's fingerprint (64 hexadecimal digits)").map(Self)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, f)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0[..4], f)
    }
}

impl FromStr for Incarnation {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        read_hex(text, "an incarnation (32 hexadecimal digits)").map(Self)
    }
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.0, f)
    }
}

impl fmt::Debug for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The migration's id and the attempt's number, such as `00010203ff050607/2`.
impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.migration, self.attempt.0)
    }
}

impl FromStr for MigrationId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        read_hex(text, "a migration's id (16 hexadecimal digits)").map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_their_text() {
        let host = HostId(std::array::from_fn(|i| i as u8 * 7));
        assert_eq!(host.to_string().parse(), Ok(host));
        assert_eq!(host.to_string().len(), 79);
        let migration = MigrationId([0, 1, 2, 3, 0xff, 5, 6, 7]);
        assert_eq!(migration.to_string(), "00010203ff050607");
        assert_eq!(migration.to_string().parse(), Ok(migration));
    }

    #[test]
    fn the_text_of_an_attempt_names_its_migration() {
        let id = AttemptId {
            migration: MigrationId([0, 1, 2, 3, 0xff, 5, 6, 7]),
            attempt: Attempt(12),
        };
        assert_eq!(id.to_string(), "00010203ff050607/12");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "12",
            "zz010203ff050607",
            "+1010203ff050607",
            "ÿ010203ff05060",
        ] {
            assert!(text.parse::<MigrationId>().is_err(), "{text}");
        }
    }
}
