//! Defines the strategies for disks that move with their guest, and for their base images.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The strategy for local disks: those that only the source has. Disks that both hosts share are
/// not copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskChoice {
    /// `precopy` or `mirror` for each disk, by the rate of the link and of the guest's writes.
    #[default]
    Auto,
    /// The whole disk is sent before the guest is stopped.
    Precopy,
    /// The whole disk is sent before the guest is stopped. When the copy is complete, each write of
    /// the guest also waits for the destination.
    Mirror,
    /// Blocks that the guest seldom writes are sent before it is stopped. The destination fetches
    /// the missing blocks after the switchover.
    Hybrid,
    /// Nothing of the disk is sent before the guest is stopped. The destination fetches the missing
    /// blocks after the switchover.
    Postcopy,
    /// No disk is copied: both hosts share all disks.
    Shared,
}

impl DiskChoice {
    /// All strategies.
    pub const ALL: [Self; 6] = [
        Self::Auto,
        Self::Precopy,
        Self::Mirror,
        Self::Hybrid,
        Self::Postcopy,
        Self::Shared,
    ];

    /// Returns the name in JSON.
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

    /// Returns whether this is the default, `auto`.
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

/// When a guest runs at a destination that does not have its disks' base images completely.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BaseChoice {
    /// When the base images are complete. Then the guest needs no image repository.
    #[default]
    Whole,
    /// At once. Missing blocks that the guest reads are fetched first, all others in the
    /// background. While the image repository cannot be reached, these reads wait.
    Lazy,
}

impl BaseChoice {
    /// All choices.
    pub const ALL: [Self; 2] = [Self::Whole, Self::Lazy];

    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Lazy => "lazy",
        }
    }

    /// Returns whether this is the default, `whole`.
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
