//! Defines the choices for disks that move with their guest.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How the disks move that are on the source host alone. Disks that both hosts see stay where they
/// are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskChoice {
    /// As suits the guest and the link.
    #[default]
    Auto,
    /// All of a disk before the guest is stopped.
    Precopy,
    /// All of a disk before the guest is stopped, and each of its writes before it is answered.
    Mirror,
    /// What is seldom written before the guest is stopped, the rest when it runs at the
    /// destination.
    Hybrid,
    /// All of a disk when the guest runs at the destination.
    Postcopy,
    /// Not at all: both hosts see every disk.
    Shared,
}

impl DiskChoice {
    /// Every choice.
    pub const ALL: [Self; 6] = [
        Self::Auto,
        Self::Precopy,
        Self::Mirror,
        Self::Hybrid,
        Self::Postcopy,
        Self::Shared,
    ];

    /// Its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Precopy => "precopy",
            Self::Mirror => "mirror",
            Self::Hybrid => "hybrid",
            Self::Postcopy => "postcopy",
            Self::Shared => "shared",
        }
    }

    /// Whether nothing was chosen.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for DiskChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DiskChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("it is one of {names}")
        })
    }
}

/// When the guest goes on at a destination that does not have all of a base image that its disks
/// stand on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BaseChoice {
    /// When all of it is there: it needs no repository then.
    #[default]
    Whole,
    /// At once: what it reads that is missing is fetched then, and all else behind it. While the
    /// repository is away it waits
    /// for that.
    Lazy,
}

impl BaseChoice {
    /// Every choice.
    pub const ALL: [Self; 2] = [Self::Whole, Self::Lazy];

    /// Its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Lazy => "lazy",
        }
    }

    /// Whether nothing was chosen.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for BaseChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BaseChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.name() == text);
        found.ok_or_else(|| "it is one of whole, lazy".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_json() {
        for choice in DiskChoice::ALL {
            let json = serde_json::to_string(&choice).unwrap();
            assert_eq!(json, format!("\"{choice}\""));
            assert_eq!(choice.name().parse(), Ok(choice));
        }
        for choice in BaseChoice::ALL {
            let json = serde_json::to_string(&choice).unwrap();
            assert_eq!(json, format!("\"{choice}\""));
            assert_eq!(choice.name().parse(), Ok(choice));
        }
        assert!("both".parse::<DiskChoice>().unwrap_err().contains("mirror"));
    }
}
