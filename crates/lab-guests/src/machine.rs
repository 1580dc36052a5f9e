//! Asks a QEMU what its machine, its disks and its settings are, and compares two such answers.

use longhaul_lab::error::LabError;
use longhaul_lab::peer::qmp::Qmp;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Questions about a QEMU that a move which is given up must not change.
const SETTINGS: [&str; 20] = [
    "query-status",
    "query-name",
    "query-uuid",
    "query-cpus-fast",
    "query-hotpluggable-cpus",
    "query-memory-size-summary",
    "query-memory-devices",
    "query-iothreads",
    "query-chardev",
    "query-block",
    "query-named-block-nodes",
    "query-block-jobs",
    "query-jobs",
    "query-block-exports",
    "query-migrate-capabilities",
    "query-migrate-parameters",
    "query-fdsets",
    "query-rx-filter",
    "query-tpm",
    "query-vm-generation-id",
];
/// Questions about the machine, whose answers a move does not change.
const MACHINE: [&str; 5] = [
    "query-uuid",
    "query-hotpluggable-cpus",
    "query-memory-size-summary",
    "query-memory-devices",
    "query-vm-generation-id",
];
/// Fields that change by themselves, or say where the host's end of something is.
const RESTLESS: [&str; 5] = ["actual-size", "thread-id", "filename", "offset", "qtest"];
/// Properties of devices that name something of the host, or that a `-drive` can set as well.
const OF_THE_HOST: [&str; 12] = [
    "drive",
    "chardev",
    "netdev",
    "iothread",
    "memdev",
    "rng",
    "romfile",
    "audiodev",
    "tpmdev",
    "werror",
    "rerror",
    "write-cache",
];
/// Lines of the device tree that the guest's firmware changes: `busnr` is the number of a bus by
/// its bridge, and `addr 0.1, port 1, ...` a device's address on a USB bus.
const BY_GUEST: [&str; 6] = ["bar ", "class ", "mmio ", "MCFG = ", "busnr = ", "addr "];
/// The place of a device on its bus, which begins in the same way.
const PLACE: &str = "addr = ";
/// The beginning of the path of a device without an id that the board has.
const UNNAMED: &str = "/machine/unattached/device[";
/// The most differences that are reported.
const SHOWN_MAX: usize = 12;

/// A QEMU's answers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answers {
    /// Everything that the same process answers again later.
    settings: BTreeMap<String, Value>,
    /// What any QEMU with this guest answers.
    machine: BTreeMap<String, Value>,
    /// The state of the guest.
    pub(crate) status: String,
}

impl Answers {
    /// Asks the QEMU at a socket.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn of(socket: &Path) -> Result<Self, LabError> {
        let mut qmp = Qmp::connect(socket)?;
        let known = qmp.execute("query-commands", &json!({}))?;
        let known: Vec<&str> = list(&known).filter_map(|it| it["name"].as_str()).collect();
        let mut settings = BTreeMap::new();
        for command in SETTINGS
            .into_iter()
            .filter(|command| known.contains(command))
        {
            // Some are refused where the machine has no such part.
            let answer = qmp.execute(command, &json!({})).unwrap_or(Value::Null);
            settings.insert(command.to_owned(), stable(answer));
        }
        let tree = monitor(&mut qmp, "info qtree")?;
        let blocks = monitor(&mut qmp, "info ramblock")?;
        let kind = json!({"path": "/machine", "property": "type"});
        let kind = qmp.execute("qom-get", &kind)?;
        let mut machine = BTreeMap::new();
        for command in MACHINE {
            if let Some(answer) = settings.get(command) {
                machine.insert(command.to_owned(), answer.clone());
            }
        }
        machine.insert("type".to_owned(), kind);
        machine.insert("devices".to_owned(), devices(&tree).into());
        machine.insert("memory blocks".to_owned(), memory_blocks(&blocks).into());
        machine.insert("cpus".to_owned(), cpus(&settings).into());
        let groups = groups(&mut qmp)?;
        machine.insert("disks".to_owned(), disks(&settings, &groups).into());
        machine.insert("cards".to_owned(), cards(&settings).into());
        let tpms = settings.get("query-tpm").map(list).into_iter().flatten();
        let tpms: Vec<Value> = tpms.map(|tpm| tpm["model"].clone()).collect();
        machine.insert("tpms".to_owned(), tpms.into());
        settings.insert("info qtree".to_owned(), lines(&tree).into());
        let status = settings["query-status"]["status"]
            .as_str()
            .unwrap_or_default();
        Ok(Self {
            status: status.to_owned(),
            settings,
            machine,
        })
    }

    /// Returns the names of bitmaps that are in memory only.
    pub(crate) fn passing_bitmaps(&self) -> Vec<String> {
        let drives = self.settings.get("query-block").into_iter().flat_map(list);
        let bitmaps = drives.flat_map(|drive| list(&drive["inserted"]["dirty-bitmaps"]));
        let passing = bitmaps.filter(|bitmap| bitmap["persistent"] == false);
        passing
            .filter_map(|bitmap| Some(bitmap["name"].as_str()?.to_owned()))
            .collect()
    }

    /// Returns the differences between this process before and after something.
    pub(crate) fn changes(&self, after: &Self) -> Vec<String> {
        differences(&self.settings, &after.settings)
    }

    /// Returns the differences between the machines of two QEMUs.
    pub(crate) fn other_machine(&self, other: &Self) -> Vec<String> {
        differences(&self.machine, &other.machine)
    }
}

fn monitor(qmp: &mut Qmp, command: &str) -> Result<String, LabError> {
    let words = json!({"command-line": command});
    let answer = qmp.execute("human-monitor-command", &words)?;
    Ok(answer.as_str().unwrap_or_default().to_owned())
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Returns an answer without the fields that change by themselves, with its lists in one order, and
/// with the same name for all nodes that QEMU named.
fn stable(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map
                .into_iter()
                .filter(|(key, _)| !RESTLESS.contains(&key.as_str()));
            Value::Object(kept.map(|(key, value)| (key, stable(value))).collect())
        }
        Value::Array(values) => {
            let mut values: Vec<Value> = values.into_iter().map(stable).collect();
            values.sort_by_key(Value::to_string);
            Value::Array(values)
        }
        Value::String(text) => Value::String(without_numbers(&text)),
        other => other,
    }
}

/// Returns a text in which every `#block123` is `#block`.
fn without_numbers(text: &str) -> String {
    let mut parts = text.split("#block");
    let mut result = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        result.push_str("#block");
        result.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
    }
    result
}

/// Returns the lines of `info qtree` without the addresses that the guest gives to its devices.
fn lines(text: &str) -> Vec<String> {
    let fixed = text.lines().filter(|line| !is_by_guest(line.trim_start()));
    fixed.map(without_numbers).collect()
}

fn is_by_guest(line: &str) -> bool {
    !line.starts_with(PLACE) && BY_GUEST.iter().any(|word| line.starts_with(word))
}

/// Returns the devices of `info qtree`, one line for each property, in one order: a bus names its
/// devices in the reverse order of their creation.
fn devices(tree: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut path: Vec<(usize, String)> = Vec::new();
    let mut lines = tree.lines().peekable();
    while let Some(line) = lines.next() {
        let depth = line.len() - line.trim_start().len();
        let text = line.trim();
        if let Some(device) = text.strip_prefix("dev: ") {
            path.retain(|(other, _)| *other < depth);
            let kind = device.split(',').next().unwrap_or(device);
            // The place on the bus follows among the properties.
            let address = lines
                .clone()
                .take_while(|next| !next.trim().starts_with("dev: "));
            let mut address = address.filter_map(|next| next.trim().strip_prefix(PLACE));
            let place = address.next().unwrap_or_default();
            path.push((depth, format!("{kind}@{place}")));
            found.push(shown(&path));
        } else if let Some(bus) = text.strip_prefix("bus: ") {
            path.retain(|(other, _)| *other < depth);
            let number = bus.rsplit_once('.').map_or("", |(_, number)| number);
            path.push((depth, number.to_owned()));
        } else if let Some((name, value)) = text.split_once(" = ")
            && !OF_THE_HOST.contains(&name)
            && !is_by_guest(text)
        {
            // QEMU numbers the parts of the board, and an optional one before them counts.
            let value = match value.trim_matches('"').starts_with(UNNAMED) {
                true => UNNAMED,
                false => value,
            };
            found.push(format!("{}: {name} = {value}", shown(&path)));
        }
    }
    found.sort();
    found
}

fn shown(path: &[(usize, String)]) -> String {
    let parts: Vec<&str> = path.iter().map(|(_, part)| part.as_str()).collect();
    parts.join("/")
}

/// Returns the names and sizes of `info ramblock`.
fn memory_blocks(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in text.lines().skip(1) {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        // The name is first; an offset is followed by the size in use, the largest size, and an
        // address of this process.
        let sizes = words.iter().filter(|word| word.starts_with("0x"));
        let sizes: Vec<&str> = sizes.copied().skip(1).take(2).collect();
        let name = words.first().copied().unwrap_or_default();
        found.push(format!("{name} {}", sizes.join(" ")));
    }
    found.sort();
    found
}

fn cpus(settings: &BTreeMap<String, Value>) -> Vec<String> {
    let cpus = settings.get("query-cpus-fast").into_iter().flat_map(list);
    let mut found: Vec<String> = cpus.map(|cpu| cpu["props"].to_string()).collect();
    found.sort();
    found
}

/// Returns the limits of each `throttle-group`.
fn groups(qmp: &mut Qmp) -> Result<BTreeMap<String, Value>, LabError> {
    let mut found = BTreeMap::new();
    let objects = qmp.execute("qom-list", &json!({"path": "/objects"}))?;
    for object in list(&objects).filter(|it| it["type"] == "child<throttle-group>") {
        let name = object["name"].as_str().unwrap_or_default();
        let path = format!("/objects/{name}");
        let limits = qmp.execute("qom-get", &json!({"path": path, "property": "limits"}))?;
        found.insert(name.to_owned(), limits);
    }
    Ok(found)
}

/// Returns each drive as the guest sees it: its medium, not the nodes below it.
fn disks(settings: &BTreeMap<String, Value>, groups: &BTreeMap<String, Value>) -> Vec<String> {
    let drives = settings.get("query-block").into_iter().flat_map(list);
    let drives = drives.filter(|drive| {
        // A drive that no device uses is not part of the guest.
        drive["qdev"].is_string() || drive["inserted"]["ro"] == false
    });
    let drives: Vec<(&Value, Vec<Limits>)> =
        drives.map(|drive| (drive, limits(drive, groups))).collect();
    let sharing = |limits: &Limits| {
        let of = drives.iter().flat_map(|(_, limits)| limits);
        of.filter(|other| other.group == limits.group).count()
    };
    let mut found: Vec<String> = drives
        .iter()
        .map(|(drive, limits)| {
            let limits = limits.iter().map(|limits| {
                let numbers = Value::Object(limits.numbers.clone());
                json!({"limits": numbers, "drives": sharing(limits)})
            });
            medium(drive, limits.collect())
        })
        .collect();
    found.sort();
    found
}

/// Limits on the requests of a drive.
struct Limits {
    /// The name of the group that has them.
    group: String,
    /// Those that limit something, by their names of drives.
    numbers: Map<String, Value>,
}

/// Returns the limits that a drive's requests pass: its own, and those of the groups of nodes below
/// it.
fn limits(drive: &Value, groups: &BTreeMap<String, Value>) -> Vec<Limits> {
    let medium = &drive["inserted"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut found = vec![Limits {
        group: text(&medium["group"]),
        numbers: numbers(|of_drive, _| &medium[of_drive]),
    }];
    let file = medium["file"].as_str().unwrap_or_default();
    let file = file.strip_prefix("json:").unwrap_or_default();
    let file: Value = serde_json::from_str(file).unwrap_or_default();
    let mut node = &file;
    while node.is_object() {
        let group = text(&node["throttle-group"]);
        found.extend(groups.get(&group).map(|limits| Limits {
            group,
            numbers: numbers(|_, of_group| &limits[of_group]),
        }));
        node = &node["file"];
    }
    found.retain(|limits| !limits.numbers.is_empty());
    found
}

/// Returns the limits that are set. They are read by their names of drives and of groups.
fn numbers<'a>(read: impl Fn(&str, &str) -> &'a Value) -> Map<String, Value> {
    const KINDS: [(&str, &str); 6] = [
        ("bps", "bps-total"),
        ("bps_rd", "bps-read"),
        ("bps_wr", "bps-write"),
        ("iops", "iops-total"),
        ("iops_rd", "iops-read"),
        ("iops_wr", "iops-write"),
    ];
    let mut names = vec![("iops_size".to_owned(), "iops-size".to_owned())];
    for (of_drive, of_group) in KINDS {
        for (one, other) in [("", ""), ("_max", "-max"), ("_max_length", "-max-length")] {
            names.push((format!("{of_drive}{one}"), format!("{of_group}{other}")));
        }
    }
    let set = names.into_iter().filter_map(|(of_drive, of_group)| {
        let value = read(&of_drive, &of_group);
        // By default, a burst lasts for a second.
        let usual = u64::from(of_drive.ends_with("_length"));
        (value.as_u64()? > usual).then(|| (of_drive, value.clone()))
    });
    set.collect()
}

fn medium(drive: &Value, limits: Vec<Value>) -> String {
    let mut shown = Map::new();
    for key in ["removable", "tray_open"] {
        shown.insert(key.to_owned(), drive[key].clone());
    }
    let medium = &drive["inserted"];
    for key in ["ro", "encrypted"] {
        shown.insert(key.to_owned(), medium[key].clone());
    }
    let cache = medium["cache"]["writeback"].clone();
    shown.insert("write cache".to_owned(), cache);
    shown.insert("limits".to_owned(), limits.into());
    shown.insert("bytes".to_owned(), medium["image"]["virtual-size"].clone());
    let bitmaps = list(&medium["dirty-bitmaps"]).filter(|bitmap| bitmap["persistent"] == true);
    let bitmaps = bitmaps.map(|bitmap| bitmap["name"].clone());
    shown.insert("bitmaps".to_owned(), bitmaps.collect());
    Value::Object(shown).to_string()
}

fn cards(settings: &BTreeMap<String, Value>) -> Vec<String> {
    let cards = settings.get("query-rx-filter").into_iter().flat_map(list);
    let mut found: Vec<String> = cards.map(|card| card["main-mac"].to_string()).collect();
    found.sort();
    found
}

/// Returns what differs between two sets of answers.
fn differences(before: &BTreeMap<String, Value>, after: &BTreeMap<String, Value>) -> Vec<String> {
    let mut found = Vec::new();
    for (question, old) in before {
        let new = after.get(question).unwrap_or(&Value::Null);
        if old == new {
            continue;
        }
        let (gone, come) = (missing(old, new), missing(new, old));
        found.extend(gone.iter().map(|part| format!("{question}: gone: {part}")));
        found.extend(come.iter().map(|part| format!("{question}: new: {part}")));
        if gone.is_empty() && come.is_empty() {
            found.push(format!("{question}: {old} became {new}"));
        }
    }
    let more = found.len().saturating_sub(SHOWN_MAX);
    if more > 0 {
        found.truncate(SHOWN_MAX);
        found.push(format!("and {more} more"));
    }
    found
}

/// Returns the entries of a list that another one does not have, as often as it has them.
fn missing(from: &Value, other: &Value) -> Vec<String> {
    let mut rest: Vec<&Value> = list(other).collect();
    let mut found = Vec::new();
    for entry in list(from) {
        match rest.iter().position(|it| *it == entry) {
            Some(at) => drop(rest.swap_remove(at)),
            None => found.push(match entry {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            }),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "\
bus: main-system-bus
  type System
  dev: i440FX-pcihost, id \"\"
    bus: pci.0
      type PCI
      dev: virtio-net-pci, id \"n\"
        addr = 03.0
        netdev = \"net0\"
        bar 0: i/o at 0xffffffffffffffff [0x1e]
      dev: VGA, id \"\"
        addr = 02.0
        vgamem_mb = 16 (0x10)
";

    #[test]
    fn devices_are_compared_without_what_belongs_to_the_host() {
        let devices = devices(TREE);
        let wanted = [
            "main-system-bus/i440FX-pcihost@/0/VGA@02.0",
            "main-system-bus/i440FX-pcihost@/0/VGA@02.0: addr = 02.0",
            "main-system-bus/i440FX-pcihost@/0/VGA@02.0: vgamem_mb = 16 (0x10)",
        ];
        let has = |line: &str| devices.iter().any(|device| device.ends_with(line));
        for line in wanted {
            let line = line.trim_start_matches("main-system-bus/");
            assert!(has(line), "{line}: {devices:#?}");
        }
        assert!(
            !devices
                .iter()
                .any(|line| line.contains("net0") || line.contains("bar 0"))
        );
    }

    #[test]
    fn nodes_that_qemu_named_are_the_same_whatever_their_numbers() {
        let before = stable(json!([{"node": "#block156", "actual-size": 5}, {"node": "a"}]));
        let after = stable(json!([{"node": "a"}, {"node": "#block7", "actual-size": 6}]));
        assert_eq!(before, after);
    }

    #[test]
    fn limits_are_the_same_of_a_drive_and_of_a_group() {
        let shown = |drives: Value, limits: Value| {
            let settings = BTreeMap::from([("query-block".to_owned(), drives)]);
            disks(&settings, &BTreeMap::from([("g".to_owned(), limits)]))
        };
        let node =
            r#"json:{"throttle-group": "g", "driver": "throttle", "file": {"driver": "raw"}}"#;
        let plain = json!([{"qdev": "a", "inserted": {"file": "/x", "iops": 0}}]);
        let own = json!([{"qdev": "a", "inserted":
            {"file": "/x", "iops": 5, "iops_max_length": 1, "group": "a"}}]);
        let below = json!([{"qdev": "a", "inserted": {"file": node, "iops": 0}}]);
        let groups = json!({"iops-total": 5, "bps-read-max-length": 1, "bps-read": 0});
        assert_eq!(
            shown(own.clone(), json!({})),
            shown(below.clone(), groups.clone())
        );
        assert_ne!(
            shown(own.clone(), json!({})),
            shown(plain.clone(), json!({}))
        );
        let none = json!({"iops-total": 0});
        assert_eq!(shown(plain, json!({})), shown(below.clone(), none));
        // Both apply.
        let mut both = own;
        both[0]["inserted"]["file"] = node.into();
        assert_ne!(
            shown(both, groups.clone()),
            shown(below.clone(), groups.clone())
        );
        // Two disks share one limit.
        let two = json!([below[0], below[0]]);
        let alone = shown(below, groups.clone());
        assert_ne!(shown(two, groups)[0], alone[0]);
    }

    #[test]
    fn differences_name_what_is_gone_and_what_is_new() {
        let answers = |value: Value| BTreeMap::from([("disks".to_owned(), value)]);
        let found = differences(
            &answers(json!(["a", "b", "b"])),
            &answers(json!(["b", "c"])),
        );
        assert_eq!(found, ["disks: gone: a", "disks: gone: b", "disks: new: c"]);
        let found = differences(&answers(json!("pc")), &answers(json!("q35")));
        assert_eq!(found, ["disks: \"pc\" became \"q35\""]);
    }
}
