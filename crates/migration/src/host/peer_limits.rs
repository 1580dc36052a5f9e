//! Limits on each trusted host's use of this host, from the configuration.

use crate::host::names::is_name;
use crate::host::paths::PathTable;
use longhaul_protocol::HostId;
use longhaul_protocol::units::{parse_bytes, parse_duration};
use serde::{Deserialize, Deserializer, de};
use std::collections::BTreeMap;
use std::time::Duration;

/// Limits on one trusted host's use of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerLimits {
    /// Guests from it that arrive or run here at once.
    pub(crate) guests: u32,
    /// Guests from it that arrive at once.
    pub(crate) arriving: u32,
    /// Memory of its guests together, in bytes.
    pub(crate) memory_bytes: u64,
    /// Virtual CPUs of its guests together.
    pub(crate) vcpus: u32,
    /// Images that its guests may use. None allows all images of this host.
    pub(crate) images: Option<Vec<String>>,
    /// Networks that its guests may use. None allows all networks of this host.
    pub(crate) networks: Option<Vec<String>>,
    /// Folders that its guests may use. None allows all folders of this host.
    pub(crate) folders: Option<Vec<String>>,
    /// Devices of parcels that it may use. None allows all that are configured.
    pub(crate) parcel_devices: Option<Vec<String>>,
    /// Threads that decode and hash for it at once.
    pub(crate) workers: u32,
    /// Migrations that it may begin per hour, including refused ones.
    pub(crate) attempts_per_hour: u32,
    /// Queries per minute.
    pub(crate) queries_per_minute: u32,
    /// Channels at once, over all its connections.
    pub(crate) channels: u32,
    /// The period in which an arriving guest must make minimal progress, or is given up.
    pub(crate) stall: Duration,
    /// Time limit for a guest to arrive.
    pub(crate) move_time: Duration,
}

impl PeerLimits {
    /// Returns the defaults for a host of this size.
    pub(crate) fn defaults(memory_bytes: u64, cpus: usize) -> Self {
        Self {
            guests: 64,
            arriving: 8,
            memory_bytes: memory_bytes / 4 * 3,
            vcpus: u32::try_from(cpus * 8).unwrap_or(u32::MAX).max(64),
            images: None,
            networks: None,
            folders: None,
            parcel_devices: None,
            workers: 2,
            attempts_per_hour: 600,
            queries_per_minute: 120,
            channels: 64,
            stall: Duration::from_secs(15 * 60),
            move_time: Duration::from_secs(72 * 3600),
        }
    }
}

/// A table of limits. A missing value keeps its default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct LimitsTable {
    guests: Option<u32>,
    arriving: Option<u32>,
    #[serde(deserialize_with = "bytes")]
    memory: Option<u64>,
    vcpus: Option<u32>,
    images: Option<Vec<String>>,
    networks: Option<Vec<String>>,
    folders: Option<Vec<String>>,
    parcel_devices: Option<Vec<String>>,
    workers: Option<u32>,
    attempts_per_hour: Option<u32>,
    queries_per_minute: Option<u32>,
    channels: Option<u32>,
    #[serde(deserialize_with = "time")]
    stall: Option<Duration>,
    #[serde(deserialize_with = "time")]
    move_time: Option<Duration>,
}

/// The configuration of one host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct HostTable {
    limits: LimitsTable,
    /// The network paths that are used at once.
    pub(crate) paths: Vec<PathTable>,
}

/// The limits of all hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Limits {
    all: PeerLimits,
    /// Limits by the name of the table: a trusted host's name or its fingerprint.
    hosts: BTreeMap<String, PeerLimits>,
}

impl Limits {
    /// Combines the limits of all hosts with those of single hosts.
    pub(crate) fn new(
        all: &LimitsTable,
        hosts: &BTreeMap<String, HostTable>,
    ) -> Result<Self, String> {
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory = crate::host::meminfo::meminfo(&memory, "MemTotal").unwrap_or(u64::MAX);
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let all = all.over(&PeerLimits::defaults(memory, cpus));
        check("limits", &all)?;
        let mut limits = Self {
            hosts: BTreeMap::new(),
            all,
        };
        for (name, table) in hosts {
            if !is_name(name) && name.parse::<HostId>().is_err() {
                return Err(format!(
                    "`hosts.{name:?}` is neither the name of a trusted host nor a fingerprint"
                ));
            }
            let host = table.limits.over(&limits.all);
            check(&format!("hosts.{name}.limits"), &host)?;
            limits.hosts.insert(name.clone(), host);
        }
        Ok(limits)
    }

    /// Returns the name of a host's own table, by its fingerprint, or else by its name.
    pub(crate) fn table_of(&self, host: HostId, name: &str) -> Option<&str> {
        let is_its = |table: &&String| table.parse() == Ok(host);
        let named = || self.hosts.keys().find(|table| *table == name);
        let table = self.hosts.keys().find(is_its).or_else(named);
        table.map(String::as_str)
    }

    /// Returns the limits of a table. Without a table returns the limits of all hosts.
    pub(crate) fn of_table(&self, table: Option<&str>) -> &PeerLimits {
        table
            .and_then(|table| self.hosts.get(table))
            .unwrap_or(&self.all)
    }

    /// Returns the names of all tables of single hosts.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &str> {
        self.hosts.keys().map(String::as_str)
    }
}

fn check(table: &str, limits: &PeerLimits) -> Result<(), String> {
    for (key, value) in [("workers", limits.workers), ("channels", limits.channels)] {
        if !(1..=1024).contains(&value) {
            return Err(format!("`{table}.{key}` is {value}: it must be 1 to 1024"));
        }
    }
    for (key, time) in [("stall", limits.stall), ("move_time", limits.move_time)] {
        if time < Duration::from_secs(1) || time > Duration::from_secs(366 * 86_400) {
            return Err(format!("`{table}.{key}` must be between 1s and 8784h"));
        }
    }
    Ok(())
}

impl LimitsTable {
    fn over(&self, base: &PeerLimits) -> PeerLimits {
        PeerLimits {
            guests: self.guests.unwrap_or(base.guests),
            arriving: self.arriving.unwrap_or(base.arriving),
            memory_bytes: self.memory.unwrap_or(base.memory_bytes),
            vcpus: self.vcpus.unwrap_or(base.vcpus),
            images: self.images.clone().or_else(|| base.images.clone()),
            networks: self.networks.clone().or_else(|| base.networks.clone()),
            folders: self.folders.clone().or_else(|| base.folders.clone()),
            parcel_devices: self
                .parcel_devices
                .clone()
                .or_else(|| base.parcel_devices.clone()),
            workers: self.workers.unwrap_or(base.workers),
            attempts_per_hour: self.attempts_per_hour.unwrap_or(base.attempts_per_hour),
            queries_per_minute: self.queries_per_minute.unwrap_or(base.queries_per_minute),
            channels: self.channels.unwrap_or(base.channels),
            stall: self.stall.unwrap_or(base.stall),
            move_time: self.move_time.unwrap_or(base.move_time),
        }
    }
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_bytes(&text).map(Some).map_err(de::Error::custom)
}

fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_duration(&text).map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct Document {
        #[serde(default)]
        limits: LimitsTable,
        #[serde(default)]
        hosts: BTreeMap<String, HostTable>,
    }

    fn limits(text: &str) -> Result<Limits, String> {
        let document: Document = toml::from_str(text).map_err(|error| error.to_string())?;
        Limits::new(&document.limits, &document.hosts)
    }

    #[test]
    fn a_hosts_own_limits_go_before_those_of_all() {
        let limits = limits(
            "[limits]\nguests = 3\nmemory = \"8GiB\"\n[hosts.paris-2.limits]\nguests = 1\n\
             images = [\"a\"]\nstall = \"2min\"\n",
        )
        .unwrap();
        let (paris, lyon) = (limits.of_table(Some("paris-2")), limits.of_table(None));
        assert_eq!((paris.guests, lyon.guests), (1, 3));
        assert_eq!((paris.memory_bytes, lyon.memory_bytes), (8 << 30, 8 << 30));
        assert_eq!(paris.images, Some(vec!["a".to_owned()]));
        assert_eq!(lyon.images, None);
        assert_eq!(paris.stall, Duration::from_secs(120));
        assert_eq!(lyon.arriving, PeerLimits::defaults(0, 1).arriving);
    }

    #[test]
    fn the_documentations_example_is_read() {
        let page = include_str!("../../../../docs/operating.md");
        let (_, rest) = page.split_once("```toml\n[limits]").unwrap();
        let (example, _) = rest.split_once("```").unwrap();
        let limits = limits(&format!("[limits]{example}")).unwrap();
        let (all, paris) = (limits.of_table(None), limits.of_table(Some("paris-2")));
        let mut defaults = PeerLimits::defaults(24 << 30, 8);
        assert_eq!(*all, defaults);
        defaults.guests = 4;
        defaults.images = Some(vec!["debian-12".to_owned()]);
        defaults.networks = Some(vec!["office".to_owned()]);
        defaults.folders = Some(Vec::new());
        defaults.parcel_devices = Some(vec!["wd1".to_owned()]);
        assert_eq!(*paris, defaults);
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (text, expected) in [
            ("[limits]\nworkers = 0", "limits.workers"),
            ("[hosts.a.limits]\nstall = \"1ms\"", "hosts.a.limits.stall"),
            ("[limits]\nguest = 3", "unknown field"),
            ("[limits]\nmemory = \"many\"", "4GiB"),
            ("[hosts.\"a/b\".limits]", "neither the name"),
        ] {
            let error = limits(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
