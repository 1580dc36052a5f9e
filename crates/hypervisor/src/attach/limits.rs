//! Finds the limits on the requests of a guest's disks, as they are now.

use crate::hardware::more::LIMITS;
use crate::qmp::{Qmp, QmpError};
use serde_json::Value;
use std::collections::BTreeMap;

/// The limits of each device that has any, by its path or id.
pub(super) type Limits = BTreeMap<String, BTreeMap<String, String>>;

/// Queries the limits.
pub(super) async fn look(qmp: &Qmp) -> Result<Limits, QmpError> {
    let drives = qmp.query("query-block").await?;
    let drives = drives.as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(drives.iter().filter_map(limited).collect())
}

fn limited(drive: &Value) -> Option<(String, BTreeMap<String, String>)> {
    let device = drive["qdev"].as_str()?;
    let inserted = &drive["inserted"];
    // A burst of no size, and a burst of a second, are what QEMU sets by itself.
    let plain = |name: &&str, value: u64| match name.ends_with("_max_length") {
        true => value <= 1,
        false => value == 0,
    };
    let limits = LIMITS.iter().filter_map(|name| {
        let value = inserted[*name]
            .as_u64()
            .filter(|value| !plain(name, *value))?;
        Some(((*name).to_owned(), value.to_string()))
    });
    let mut limits: BTreeMap<String, String> = limits.collect();
    if limits.is_empty() {
        return None;
    }
    let group = inserted["group"].as_str();
    let group = group.filter(|group| crate::hardware::tables::is_word(group));
    limits.extend(group.map(|group| ("group".to_owned(), group.to_owned())));
    Some((device.to_owned(), limits))
}

/// Returns the limits of a device, as settings of the disk of this name.
pub(super) fn of<'a>(
    limits: &'a Limits,
    id: Option<&str>,
    path: &str,
    disk: &'a str,
) -> impl Iterator<Item = (String, String)> + 'a {
    let backend = format!("{path}/virtio-backend");
    let own = limits
        .iter()
        .find(|(device, _)| Some(device.as_str()) == id || *device == path || **device == backend);
    let own = own.into_iter().flat_map(|(_, limits)| limits);
    own.map(move |(name, value)| (format!("limit.{disk}.{name}"), value.clone()))
}
