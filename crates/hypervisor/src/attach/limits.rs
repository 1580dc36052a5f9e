//! Finds the limits on the requests of a guest's disks, as they are now: those of a drive, and
//! those of a group that a `throttle` node below it is in.
//!
//! A destination has no such nodes. There all limits are those of drives. QEMU has one list of
//! groups for both.

use crate::hardware::more::LIMITS;
use crate::hardware::tables::is_word;
use crate::observe::{Blocker, at_once, children, property};
use crate::qmp::{Qmp, QmpError};
use futures_util::FutureExt;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Limits by their names in QEMU, and the name of their group.
type Set = BTreeMap<String, String>;

/// All limits on disks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Limits {
    /// Those of each drive that has any, by path or id of its device.
    drives: BTreeMap<String, Set>,
    /// Those of each group; empty for a group without limits.
    groups: BTreeMap<String, Set>,
}

/// Why the limits of a disk cannot be set elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unclear {
    /// QEMU does not report the group of a node, or its limits.
    Unknown,
    /// Two limits apply one after the other.
    Two,
}

impl Unclear {
    /// Returns this as the reason of a disk.
    pub(super) fn of(self, disk: &str) -> Blocker {
        let (why, hint) = match self {
            Self::Unknown => (
                "the limits of a `throttle` node below it are not known",
                "put the node into a group that is an object of its own (QMP `object-add` of \
                 `throttle-group`, then `blockdev-reopen` of the node)",
            ),
            Self::Two => (
                "it has more than one set of limits on its requests, and a drive elsewhere has one",
                "take the limits of its drive away (QMP `block_set_io_throttle` with zeros), or \
                 those of all but one `throttle-group` (`qom-set` of its `limits`)",
            ),
        };
        Blocker {
            text: format!("disk {disk}: {why}"),
            hint: hint.to_owned(),
        }
    }
}

/// Queries the limits.
pub(super) async fn look(qmp: &Qmp) -> Result<Limits, QmpError> {
    let (drives, objects) =
        tokio::try_join!(qmp.ask("query-block", json!({})), children(qmp, "/objects"),)?;
    let groups = objects.iter().filter(|(_, kind)| kind == "throttle-group");
    let questions = groups.map(|(name, _)| {
        let ask = async move {
            let limits = property(qmp, &format!("/objects/{name}"), "limits").await?;
            Ok((name.clone(), limits.unwrap_or_default()))
        };
        ask.boxed()
    });
    let groups = at_once(questions.collect()).await?;
    Ok(Limits::read(&drives, &groups))
}

impl Limits {
    fn read(drives: &Value, objects: &[(String, Value)]) -> Self {
        let mut found = Self::default();
        for (name, limits) in objects {
            let limit = |key: &str| limits[of_object(key)].as_u64();
            found.groups.insert(name.clone(), set(limit, Some(name)));
        }
        for drive in drives.as_array().into_iter().flatten() {
            let inserted = &drive["inserted"];
            let group = inserted["group"].as_str();
            let limits = set(|key| inserted[key].as_u64(), group);
            if limits.is_empty() {
                continue;
            }
            // A group that a drive has made is no object.
            if let Some(group) = group.filter(|group| !found.groups.contains_key(*group)) {
                found.groups.insert(group.to_owned(), limits.clone());
            }
            if let Some(device) = drive["qdev"].as_str() {
                found.drives.insert(device.to_owned(), limits);
            }
        }
        found
    }

    /// Returns whether nodes in these groups limit anything, as far as is known.
    pub(super) fn any_of(&self, throttled_by: &[Option<String>]) -> bool {
        let limited = |group: &Option<String>| {
            let limits = group.as_ref().and_then(|group| self.groups.get(group));
            limits.is_none_or(|limits| !limits.is_empty())
        };
        self.groups.values().any(|limits| !limits.is_empty()) && throttled_by.iter().any(limited)
    }

    /// Returns whether a device that is no disk of the guest has limits, by its path.
    pub(super) fn has_own(&self, path: &str) -> bool {
        self.drives.contains_key(path)
    }

    /// Returns the limits of a disk: of its device, or of the group of a node below it.
    pub(super) fn of(
        &self,
        id: Option<&str>,
        path: &str,
        throttled_by: &[Option<String>],
    ) -> Result<Set, Unclear> {
        let backend = format!("{path}/virtio-backend");
        let is_its = |device: &str| Some(device) == id || device == path || *device == *backend;
        let own = self.drives.iter().find(|(device, _)| is_its(device));
        let mut all: Vec<&Set> = own.into_iter().map(|(_, limits)| limits).collect();
        if self.groups.values().any(|limits| !limits.is_empty()) {
            for group in throttled_by {
                let limits = group.as_ref().and_then(|group| self.groups.get(group));
                all.push(limits.ok_or(Unclear::Unknown)?);
            }
        }
        all.retain(|limits| !limits.is_empty());
        match all.as_slice() {
            [] => Ok(Set::new()),
            [limits] => Ok((*limits).clone()),
            _ => Err(Unclear::Two),
        }
    }
}

/// Returns the limits among these numbers, with their group; empty if there are none.
fn set(number: impl Fn(&str) -> Option<u64>, group: Option<&str>) -> Set {
    // A burst of no size, and a burst of a second, are what QEMU sets by itself.
    let plain = |name: &str, value: u64| match name.ends_with("_max_length") {
        true => value <= 1,
        false => value == 0,
    };
    let limits = LIMITS.iter().filter_map(|name| {
        let value = number(name).filter(|value| !plain(name, *value))?;
        Some(((*name).to_owned(), value.to_string()))
    });
    let mut limits: Set = limits.collect();
    if let Some(group) = group.filter(|group| !limits.is_empty() && is_word(group)) {
        limits.insert("group".to_owned(), group.to_owned());
    }
    limits
}

/// Returns what a limit is called in an object of `throttle-group`: `bps_rd_max` is `bps-read-max`.
fn of_object(name: &str) -> String {
    let mut words = name.split('_');
    let kind = words.next().unwrap_or_default();
    let mut words = words.peekable();
    let of = match words.peek() {
        Some(&"rd") => Some("read"),
        Some(&"wr") => Some("write"),
        Some(&"size") => None,
        _ => Some("total"),
    };
    if matches!(of, Some("read" | "write")) {
        words.next();
    }
    let words = [kind].into_iter().chain(of).chain(words);
    words.collect::<Vec<_>>().join("-")
}

/// Returns the group of a `throttle` node, by the name that QEMU gives to the node's file. It cuts
/// long names off.
pub(super) fn group(file: &str) -> Option<String> {
    let text = file.strip_prefix("json:")?;
    let key = "throttle-group";
    if let Ok(node) = serde_json::from_str::<Value>(text) {
        return node[key].as_str().map(str::to_owned);
    }
    let start = text.strip_prefix(&format!("{{\"{key}\": \""))?;
    start.split_once('"').map(|(group, _)| group.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets(drives: &Value, objects: Value) -> Limits {
        let Value::Object(objects) = objects else {
            panic!("{objects}")
        };
        Limits::read(drives, &objects.into_iter().collect::<Vec<_>>())
    }

    fn shown(limits: Result<Set, Unclear>) -> Result<String, Unclear> {
        let words = |limits: Set| {
            let words = limits.iter().map(|(key, value)| format!("{key}={value}"));
            words.collect::<Vec<_>>().join(" ")
        };
        limits.map(words)
    }

    #[test]
    fn a_limit_has_another_name_in_an_object() {
        for (name, expected) in [
            ("bps", "bps-total"),
            ("bps_max", "bps-total-max"),
            ("bps_max_length", "bps-total-max-length"),
            ("bps_rd", "bps-read"),
            ("iops_wr_max_length", "iops-write-max-length"),
            ("iops_size", "iops-size"),
        ] {
            assert_eq!(of_object(name), expected);
        }
    }

    #[test]
    fn the_limits_of_a_disk_are_its_own_or_those_of_a_group() {
        let drives = json!([
            {"qdev": "/machine/peripheral/vda/virtio-backend",
             "inserted": {"iops": 7, "iops_max_length": 1, "bps": 0, "group": "of-drive"}},
            {"qdev": "sda", "inserted": {"iops": 0}},
        ]);
        let objects = json!({
            "g0": {"iops-total": 500, "bps-read-max": 9, "bps-read-max-length": 3,
                   "iops-read-max-length": 1, "iops-size": 4096},
            "g1": {"iops-total": 0, "iops-read-max-length": 1},
        });
        let limits = sets(&drives, objects);
        let of = |path: &str, groups: &[&str]| {
            let groups: Vec<_> = groups.iter().map(|it| Some((*it).to_owned())).collect();
            shown(limits.of(None, path, &groups))
        };
        let vda = "/machine/peripheral/vda";
        let own = "group=of-drive iops=7";
        let of_group = "bps_rd_max=9 bps_rd_max_length=3 group=g0 iops=500 iops_size=4096";
        assert_eq!(of(vda, &[]).unwrap(), own);
        assert_eq!(of(vda, &["g1"]).unwrap(), own);
        assert_eq!(of("sda", &[]).unwrap(), "");
        assert_eq!(of("sda", &["g0", "g1"]).unwrap(), of_group);
        assert_eq!(of("sda", &["of-drive"]).unwrap(), own);
        for (path, groups) in [
            (vda, &["g0"][..]),
            (vda, &["of-drive"]),
            ("sda", &["g0", "of-drive"]),
            ("sda", &["g0", "g0"]),
        ] {
            assert_eq!(of(path, groups), Err(Unclear::Two), "{path} {groups:?}");
        }
        assert_eq!(of("sda", &["g2"]), Err(Unclear::Unknown));
        assert_eq!(limits.of(None, "sda", &[None]), Err(Unclear::Unknown));
        // No group limits anything, whichever it is.
        let none = sets(&json!([]), json!({"g1": {"iops-total": 0}}));
        assert_eq!(none.of(None, "sda", &[None]), Ok(Set::new()));
    }

    #[test]
    fn qemu_names_the_group_of_a_node() {
        let whole = r#"json:{"file": {"driver": "raw"}, "throttle-group": "g0"}"#;
        assert_eq!(group(whole).as_deref(), Some("g0"));
        let cut = r#"json:{"throttle-group": "g0", "driver": "throttle", "file": {"dri..."#;
        assert_eq!(group(cut).as_deref(), Some("g0"));
        let cut = r#"json:{"driver": "throttle", "file": {"throttle-group": "g1", "dri..."#;
        assert_eq!(group(cut), None);
        assert_eq!(group("/images/a.qcow2"), None);
    }
}
