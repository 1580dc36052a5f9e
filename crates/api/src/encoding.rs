//! Defines the choices for encoding memory and disks, in requests and in the agent's configuration.

use longhaul_protocol::units::parse_bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The permitted levels of Zstandard.
const ZSTD_LEVELS: std::ops::RangeInclusive<i32> = -20..=19;

/// The encoding of memory and disks. For omitted fields, the configuration of the source's agent
/// applies.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Encoding {
    /// Compression: `auto`, `raw`, `lz4-fast`, `lz4`, `zstd:LEVEL`, or `zstd-long:LEVEL`, with a
    /// level from -20 to 19.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub compression: Option<CompressionChoice>,
    /// Size of the cache of sent pages, against which the changes of rewritten pages are computed:
    /// `auto`, `off`, or a size such as `64MiB`. `auto` is 16 MiB plus 1/512 of the guest's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub delta_cache: Option<DeltaCache>,
    /// Whether a block is sent as a reference if the destination has the same content elsewhere: in
    /// the guest's memory, on a disk that moves with it, or in another guest that moves there at
    /// the same time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub references: Option<bool>,
    /// Whether such references involve disks: pages with content that is on a disk, and blocks of
    /// disks with content that is in memory or on a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_references: Option<bool>,
}

impl Encoding {
    /// Returns whether no field is set.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns these choices, with unset fields taken from `other`.
    pub fn or(&self, other: &Self) -> Self {
        Self {
            compression: self.compression.or(other.compression),
            delta_cache: self.delta_cache.or(other.delta_cache),
            references: self.references.or(other.references),
            disk_references: self.disk_references.or(other.disk_references),
        }
    }
}

/// The compression of frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CompressionChoice {
    /// Chosen for each frame, by the rate of the link and by the time and the savings of the last
    /// frames.
    #[default]
    Auto,
    /// No compression.
    Raw,
    /// A faster LZ4: about twice the speed, with smaller savings.
    Lz4Fast,
    /// LZ4.
    Lz4,
    /// Zstandard with this level.
    Zstd(i32),
    /// Zstandard with this level, which also finds content of earlier frames. It uses 32 MiB on
    /// both hosts.
    ZstdLong(i32),
}

/// The size of the cache of sent pages, against which changes are computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeltaCache {
    /// 16 MiB plus 1/512 of the guest's memory.
    #[default]
    Auto,
    /// No cache: rewritten pages are sent in full.
    Off,
    /// A size, in bytes.
    Bytes(u64),
}

impl FromStr for CompressionChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let level = |level: &str| level.parse().ok().filter(|n| ZSTD_LEVELS.contains(n));
        let choice = match text {
            "auto" => Some(Self::Auto),
            "raw" => Some(Self::Raw),
            "lz4-fast" => Some(Self::Lz4Fast),
            "lz4" => Some(Self::Lz4),
            _ => match text.strip_prefix("zstd-long:") {
                Some(long) => level(long).map(Self::ZstdLong),
                None => text.strip_prefix("zstd:").and_then(level).map(Self::Zstd),
            },
        };
        choice.ok_or_else(|| {
            let text: String = text.chars().take(40).collect();
            format!(
                "`{text}` is not a compression (auto, raw, lz4-fast, lz4, zstd:LEVEL or \
                 zstd-long:LEVEL with a level from -20 to 19)"
            )
        })
    }
}

impl fmt::Display for CompressionChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Raw => f.write_str("raw"),
            Self::Lz4Fast => f.write_str("lz4-fast"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
            Self::ZstdLong(level) => write!(f, "zstd-long:{level}"),
        }
    }
}

impl FromStr for DeltaCache {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => parse_bytes(text).map(Self::Bytes).map_err(|_| {
                let text: String = text.chars().take(40).collect();
                format!("`{text}` is not a delta cache (auto, off, or a size such as 64MiB)")
            }),
        }
    }
}

impl fmt::Display for DeltaCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Bytes(bytes) if bytes.is_multiple_of(1 << 20) => {
                write!(f, "{}MiB", bytes >> 20)
            }
            Self::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl TryFrom<String> for CompressionChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<CompressionChoice> for String {
    fn from(choice: CompressionChoice) -> Self {
        choice.to_string()
    }
}

impl TryFrom<String> for DeltaCache {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeltaCache> for String {
    fn from(cache: DeltaCache) -> Self {
        cache.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_written_as_they_are_read() {
        for text in [
            "auto",
            "raw",
            "lz4-fast",
            "lz4",
            "zstd:-20",
            "zstd:1",
            "zstd:19",
            "zstd-long:-20",
            "zstd-long:6",
        ] {
            assert_eq!(text.parse::<CompressionChoice>().unwrap().to_string(), text);
        }
        for text in [
            "zstd",
            "zstd:",
            "zstd:20",
            "zstd:-21",
            "zstd-long",
            "zstd-long:20",
            "gzip",
            "",
            "Auto",
        ] {
            let error = text.parse::<CompressionChoice>().unwrap_err();
            assert!(error.contains("from -20 to 19"), "{error}");
        }
        for text in ["auto", "off", "64MiB", "4097"] {
            assert_eq!(text.parse::<DeltaCache>().unwrap().to_string(), text);
        }
        assert_eq!("1GiB".parse(), Ok(DeltaCache::Bytes(1 << 30)));
        assert!("much".parse::<DeltaCache>().unwrap_err().contains("64MiB"));
    }

    #[test]
    fn what_is_not_chosen_is_left_to_the_configuration() {
        let read = |text| serde_json::from_str::<Encoding>(text).unwrap();
        let asked = read(r#"{"compression":"zstd:3","references":null}"#);
        let configured = read(r#"{"compression":"lz4","delta_cache":"off","references":false}"#);
        let both = asked.or(&configured);
        assert_eq!(both.compression, Some(CompressionChoice::Zstd(3)));
        assert_eq!(both.delta_cache, Some(DeltaCache::Off));
        assert_eq!(both.references, Some(false));
        assert!(read("{}").is_default() && !asked.is_default());
        assert!(serde_json::from_str::<Encoding>(r#"{"compression":"zip"}"#).is_err());
    }
}
