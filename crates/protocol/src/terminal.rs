//! Terminals: hosts to which the devices of a parcel are attached, which another host writes and
//! reads.
//!
//! The channel begins with
//! [`ToDestination::ParcelDevice`](crate::message::ToDestination::ParcelDevice), and is about one
//! device. Its other messages are those of this module. The first one opens the device. Every
//! message gets one answer, in order.

use crate::limits::{NAME_BYTES_MAX, PARCEL_DEVICE_BYTES_MAX, PARCEL_TRANSFER_BYTES_MAX};
use crate::message::Refusal;
use crate::wire::{Message, WireError, limit};
use serde::{Deserialize, Serialize};

/// Bytes that are copied as a whole. They are encoded like a list of bytes, which is copied byte by
/// byte.
mod whole {
    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};
    use std::fmt;

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        struct Bytes;

        impl Visitor<'_> for Bytes {
            type Value = Vec<u8>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
                Ok(bytes.to_vec())
            }
        }

        deserializer.deserialize_bytes(Bytes)
    }
}

/// A message to a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTerminal {
    /// Opens a device that is to hold a parcel. The answer is [`FromTerminal::Opened`].
    Make {
        /// Its name in the terminal's configuration.
        device: String,
        /// The name of the new file without `.parcel`, if the device is a folder.
        file: String,
    },
    /// Opens a device that holds a parcel. The answer is [`FromTerminal::Opened`].
    Find {
        /// Its name in the terminal's configuration.
        device: String,
        /// The name of the file in a folder. Without it, the folder has one.
        file: Option<String>,
        /// Whether it is written.
        writable: bool,
    },
    /// Asks for the length of a file. The answer is [`FromTerminal::Length`].
    QueryLength,
    /// Asks for content. The answer is [`FromTerminal::Content`] or [`FromTerminal::End`].
    Read {
        /// The first byte.
        at: u64,
        /// How many bytes.
        bytes: u32,
    },
    /// Writes content. The answer is [`FromTerminal::Done`].
    Write {
        /// The first byte.
        at: u64,
        /// The bytes.
        #[serde(with = "whole")]
        content: Vec<u8>,
    },
    /// Makes everything durable that was written. The answer is [`FromTerminal::Done`].
    Sync,
    /// Drops what the terminal's system keeps of the device in memory. The answer is
    /// [`FromTerminal::Done`].
    Forget,
    /// Removes the file, if it has one cell at most. The answer is [`FromTerminal::Done`].
    Remove,
}

/// Why a terminal cannot do something with a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceFault {
    /// What the terminal's system says.
    Io {
        /// Its number for the error, if it has one.
        errno: Option<u32>,
        /// The error, for people.
        text: String,
    },
    /// The file is there already.
    NotEmpty,
    /// It is neither a folder with such a file, nor a block device.
    Unsuitable,
    /// The folder has no device of a parcel, or several.
    Ambiguous {
        /// How many it has.
        found: u32,
    },
    /// Another command writes the device.
    InUse,
}

/// An answer of a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromTerminal {
    /// The device is open.
    Opened {
        /// The name of its file, if it is in a folder.
        file: Option<String>,
        /// The bytes that it has, or of a new file those that are free.
        bytes: u64,
    },
    /// It is done.
    Done,
    /// The length of the file.
    Length {
        /// In bytes.
        bytes: u64,
    },
    /// The content that was asked for.
    Content {
        /// The bytes.
        #[serde(with = "whole")]
        content: Vec<u8>,
    },
    /// The device ends before the end of what was asked for.
    End,
    /// It could not be done.
    Failed(DeviceFault),
    /// The device is not given to this host.
    Refused(Refusal),
}

fn name(text: &str) -> Result<(), WireError> {
    let bytes = text.len() as u64;
    limit("a name", bytes, NAME_BYTES_MAX as u64)
}

/// Checks a part of a device.
fn part(at: u64, bytes: u64) -> Result<(), WireError> {
    let most = PARCEL_TRANSFER_BYTES_MAX as u64;
    limit("what is read or written at once", bytes, most)?;
    let end = at.saturating_add(bytes);
    limit("the end of a device", end, PARCEL_DEVICE_BYTES_MAX)
}

impl Message for ToTerminal {
    const BYTES_MAX: usize = PARCEL_TRANSFER_BYTES_MAX + 64;

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Make { device, file } => name(device).and_then(|()| name(file)),
            Self::Find { device, file, .. } => {
                name(device)?;
                file.as_deref().map_or(Ok(()), name)
            }
            Self::Read { at, bytes } => part(*at, u64::from(*bytes)),
            Self::Write { at, content } => part(*at, content.len() as u64),
            Self::QueryLength | Self::Sync | Self::Forget | Self::Remove => Ok(()),
        }
    }
}

impl Message for FromTerminal {
    const BYTES_MAX: usize = PARCEL_TRANSFER_BYTES_MAX + 64;

    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Opened { file, .. } => file.as_deref().map_or(Ok(()), name),
            Self::Content { content } => part(0, content.len() as u64),
            Self::Length { .. } | Self::Done | Self::End | Self::Failed(_) | Self::Refused(_) => {
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};

    #[test]
    fn the_examples_are_true() {
        let page = include_str!("../../../docs/wire.md");
        let is_in_page = |bytes: Vec<u8>| {
            let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let line = format!("\n{}\n", hex.join(" "));
            assert!(page.contains(&line), "docs/wire.md lacks {line}");
        };
        is_in_page(
            encode(&ToTerminal::Find {
                device: "wd1".to_owned(),
                file: None,
                writable: true,
            })
            .unwrap(),
        );
        let (file, bytes) = (Some("box-7-0.parcel".to_owned()), 3 << 20);
        is_in_page(encode(&FromTerminal::Opened { file, bytes }).unwrap());
        let (at, content) = (1 << 20, b"abc".to_vec());
        is_in_page(encode(&ToTerminal::Write { at, content }).unwrap());
        is_in_page(encode(&FromTerminal::Done).unwrap());
        is_in_page(encode(&ToTerminal::Read { at, bytes: 3 }).unwrap());
        let content = b"abc".to_vec();
        is_in_page(encode(&FromTerminal::Content { content }).unwrap());
        is_in_page(
            encode(&FromTerminal::Failed(DeviceFault::Io {
                errno: Some(28),
                text: "full".to_owned(),
            }))
            .unwrap(),
        );
    }

    #[test]
    fn messages_have_limits() {
        let write = |at, bytes| ToTerminal::Write {
            at,
            content: vec![7; bytes],
        };
        let last = PARCEL_DEVICE_BYTES_MAX - PARCEL_TRANSFER_BYTES_MAX as u64;
        let longest = write(last, PARCEL_TRANSFER_BYTES_MAX);
        let bytes = encode(&longest).unwrap();
        assert_eq!(decode::<ToTerminal>(&bytes), Ok(longest));
        assert!(encode(&write(0, PARCEL_TRANSFER_BYTES_MAX + 1)).is_err());
        assert!(encode(&write(last + 1, PARCEL_TRANSFER_BYTES_MAX)).is_err());
        assert!(encode(&write(u64::MAX, 1)).is_err());
        let read = |at, bytes| ToTerminal::Read { at, bytes };
        assert!(encode(&read(last, PARCEL_TRANSFER_BYTES_MAX as u32)).is_ok());
        assert!(encode(&read(0, PARCEL_TRANSFER_BYTES_MAX as u32 + 1)).is_err());
        assert!(encode(&read(u64::MAX, 1)).is_err());
        let content = vec![0; PARCEL_TRANSFER_BYTES_MAX + 1];
        assert!(encode(&FromTerminal::Content { content }).is_err());
        let (device, file) = ("d".repeat(NAME_BYTES_MAX + 1), "f".to_owned());
        assert!(encode(&ToTerminal::Make { device, file }).is_err());
    }
}
