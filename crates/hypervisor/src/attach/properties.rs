//! Chooses the properties of a device that a destination must set.

use super::found::Seen;
use super::words::Words;
use crate::hardware::tables::{Bus, Kind, Model, Serves};
use serde_json::Value;
use std::collections::BTreeMap;

/// Properties of the host's side, which this host's tables answer, and of a device's place.
const LOCAL: [&str; 20] = [
    "account-failed",
    "account-invalid",
    "addr",
    "audiodev",
    "bus",
    "channel",
    "chardev",
    "drive",
    "driver",
    "id",
    "iothread",
    "lun",
    "mac",
    "netdev",
    "nr",
    "rng",
    "scsi-id",
    "serial-number",
    "tpmdev",
    "unit",
];
/// Properties that a guest sees and that QEMU may choose: by the order of controllers, by the name
/// of a drive, by an image's content, at random.
pub(super) const CHOSEN: [&str; 6] = ["cyls", "device_id", "guid", "heads", "secs", "serial"];
/// Values of properties that follow from the machine's type where nobody sets them.
const DERIVED: [&str; 4] = ["product", "romfile", "vendor", "ver"];

/// Fills in the properties of a device: those that were set, by the words that made it or by the
/// difference from the model's own, and those that QEMU chose. Returns those that cannot be set.
pub(super) fn of(
    model: &Model,
    words: Option<&Words>,
    seen: &Seen,
    properties: &mut BTreeMap<String, String>,
) -> Vec<(String, String)> {
    let mut unfit = Vec::new();
    match words {
        Some(words) => {
            for (name, value) in words.iter().filter(|(name, _)| !is_local(model, name)) {
                match asked(model, name, value, seen) {
                    Asked::Set(value) => {
                        properties.insert(name.to_owned(), value);
                    }
                    Asked::Nothing => {}
                    Asked::Unfit => unfit.push((name.to_owned(), value.to_owned())),
                }
            }
        }
        None => {
            let changed = seen.changed.iter().map(String::as_str);
            for name in changed.filter(|name| !is_local(model, name) && !CHOSEN.contains(name)) {
                let Some(value) = seen.values.get(name).and_then(text) else {
                    continue;
                };
                // A link to an object, such as the memory of a DIMM.
                let value = match value.strip_prefix("/objects/") {
                    Some(object) => object.to_owned(),
                    None => value,
                };
                match model.property(name) {
                    Some(kind) if kind.takes(&value) => {
                        properties.insert(name.to_owned(), value);
                    }
                    _ if is_derived(name, &value) => {}
                    _ => unfit.push((name.to_owned(), value)),
                }
            }
            let has_rom = matches!(model.serves, Serves::Nic);
            if has_rom && seen.values.get("romfile").and_then(Value::as_str) == Some("") {
                properties.insert("romfile".to_owned(), String::new());
            }
            // QEMU 7.2 knows no such property of a balloon.
            if seen.kind.starts_with("virtio-balloon") {
                properties.remove("vectors");
            }
        }
    }
    for name in CHOSEN {
        let (Some(kind), Some(value)) = (model.property(name), seen.values.get(name)) else {
            continue;
        };
        let Some(value) = text(value).filter(|value| !value.is_empty() && value != "0") else {
            continue;
        };
        match kind.takes(&value) {
            true => {
                properties.insert(name.to_owned(), value);
            }
            false if properties.contains_key(name) => {}
            false => unfit.push((name.to_owned(), value)),
        }
    }
    if model.bus == Bus::Scsi {
        for name in ["channel", "lun", "scsi-id"] {
            if let Some(value) = seen.values.get(name).and_then(Value::as_u64) {
                properties.insert(name.to_owned(), value.to_string());
            }
        }
    }
    unfit
}

fn is_local(model: &Model, name: &str) -> bool {
    // A root port has a number of this name, which the guest sees.
    let is_port = name == "port" && model.bus == Bus::Usb;
    is_port || LOCAL.contains(&name) || name.starts_with("iothread-vq-mapping")
}

fn is_derived(name: &str, value: &str) -> bool {
    // Numbers below zero mean that QEMU decides.
    DERIVED.contains(&name) || value.starts_with('-')
}

enum Asked {
    Set(String),
    /// It is what every such device has.
    Nothing,
    Unfit,
}

/// Returns the value of a property that the words of a device set.
fn asked(model: &Model, name: &str, value: &str, seen: &Seen) -> Asked {
    let Some(kind) = model.property(name) else {
        // Removed from QEMU: passing the host's SCSI commands through, which nobody turns on.
        let is_off = Kind::Switch.normal(value) == "off";
        return match name == "scsi" && is_off {
            true => Asked::Nothing,
            false => Asked::Unfit,
        };
    };
    let now = seen.values.get(name).and_then(text);
    let now = now.filter(|now| kind.takes(now));
    let written = kind.normal(value);
    let written = Some(written).filter(|written| kind.takes(written));
    // `romfile=` is a setting, though QEMU shows nothing in its place as well.
    match (now, written) {
        (Some(now), _) => Asked::Set(now),
        (None, Some(written)) => Asked::Set(written),
        (None, None) => Asked::Unfit,
    }
}

/// Returns a value in the form of a command line.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::Bool(true) => Some("on".to_owned()),
        Value::Bool(false) => Some("off".to_owned()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(text) => Some(text.clone()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::found::Origin;
    use super::*;
    use serde_json::json;

    fn seen(kind: &str, values: Value, changed: &[&str]) -> Seen {
        let values = values.as_object().unwrap().clone();
        Seen {
            origin: Origin::Unnamed(0),
            path: String::new(),
            kind: kind.to_owned(),
            bus_path: None,
            values: values.into_iter().collect(),
            changed: changed.iter().map(|name| (*name).to_owned()).collect(),
        }
    }

    fn read(words: Option<&str>, seen: &Seen) -> (Vec<String>, Vec<String>) {
        let words = words.map(|words| Words::read(words, "driver"));
        let model = Model::of(&seen.kind).unwrap();
        let mut properties = BTreeMap::new();
        let unfit = of(model, words.as_ref(), seen, &mut properties);
        let joined = |(name, value)| format!("{name}={value}");
        (
            properties.into_iter().map(joined).collect(),
            unfit.into_iter().map(joined).collect(),
        )
    }

    #[test]
    fn what_was_set_is_kept_with_the_value_that_qemu_has() {
        let port = seen("pcie-root-port", json!({"port": 16, "chassis": 1}), &[]);
        let line = "pcie-root-port,id=a,bus=pcie.0,port=0x10,chassis=1,multifunction=on,x-speed=16";
        let (kept, unfit) = read(Some(line), &port);
        assert_eq!(
            kept,
            ["chassis=1", "multifunction=on", "port=16", "x-speed=16"]
        );
        assert!(unfit.is_empty(), "{unfit:?}");
        let disk = seen("virtio-blk-pci", json!({"cyls": 130, "serial": ""}), &[]);
        let line = "virtio-blk-pci,drive=d,scsi=off,bootindex=1,x-foo=1,scsi=on";
        let (kept, unfit) = read(Some(line), &disk);
        assert_eq!(kept, ["bootindex=1", "cyls=130"]);
        assert_eq!(unfit, ["x-foo=1", "scsi=on"]);
        let genid = seen("vmgenid", json!({"guid": "881ec4af-4279"}), &[]);
        assert_eq!(
            read(Some("vmgenid,guid=auto"), &genid).0,
            ["guid=881ec4af-4279"]
        );
        let tablet = seen("usb-tablet", json!({"port": "1"}), &[]);
        assert_eq!(read(Some("usb-tablet,bus=a.0,port=1"), &tablet).0, [""; 0]);
    }

    #[test]
    fn what_was_plugged_in_is_kept_as_far_as_it_differs() {
        let values = json!({
            "bootindex": -1, "romfile": "", "mq": true, "vectors": 4, "mac": "52:54:00:12:34:56",
            "host_mtu": 0, "netdev": "n",
        });
        let card = seen(
            "virtio-net-pci",
            values,
            &["bootindex", "mq", "vectors", "mac"],
        );
        let (kept, unfit) = read(None, &card);
        assert_eq!(kept, ["mq=on", "romfile=", "vectors=4"]);
        assert!(unfit.is_empty(), "{unfit:?}");
        let values = json!({
            "ver": "2.5+", "product": "QEMU HARDDISK", "serial": "a b", "device_id": "drive-scsi0",
            "lun": 1, "scsi-id": 3, "channel": 0,
        });
        let disk = seen(
            "scsi-hd",
            values,
            &["product", "ver", "serial", "device_id"],
        );
        let (kept, unfit) = read(None, &disk);
        assert_eq!(
            kept,
            ["channel=0", "device_id=drive-scsi0", "lun=1", "scsi-id=3"]
        );
        assert_eq!(unfit, ["serial=a b"]);
    }
}
