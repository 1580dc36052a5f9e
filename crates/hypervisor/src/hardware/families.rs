//! Lists the settings of options that a command line may have several times, such as `-smbios`, and
//! emits them.
//!
//! `smbios.001.serial` is key `serial` of the second `-smbios`; `numa.000.cpus.001` is the second
//! `cpus` of the first `-numa`.

use super::content;
use super::tables::Kind;
use crate::command_line::Line;
use crate::description::MEMORY_MIB_MAX;
use longhaul_protocol::hardware::Hardware;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The maximum number of options of a family.
pub(crate) const OPTIONS_MAX: usize = 256;
/// The maximum size of all contents of a description together, in bytes.
pub(crate) const CONTENTS_BYTES_MAX: usize = 64 << 10;

/// The setting with the content of the picture that SeaBIOS shows.
const SPLASH: &str = "boot.splash";

/// An option that a command line may have several times.
#[derive(Debug)]
pub(crate) struct Family {
    name: &'static str,
    keys: &'static [(&'static str, Kind)],
    /// The key that may have several values.
    repeated: &'static str,
}

use Kind::{Bytes, Number, OneOf, Switch, Text, Word};

const FAMILIES: [Family; 5] = [SMBIOS, FW_CFG, NUMA, RAM, FSDEV];

/// `-smbios`.
pub(crate) const SMBIOS: Family = Family {
    name: "smbios",
    keys: &[
        ("asset", Text),
        ("bank", Text),
        ("connector_type", Number),
        ("current-speed", Number),
        ("current_usage", Number),
        ("date", Text),
        ("designation", Text),
        ("external_reference", Text),
        ("family", Text),
        ("instance", Number),
        ("internal_reference", Text),
        ("kind", Text),
        ("loc_pfx", Text),
        ("location", Text),
        ("manufacturer", Text),
        ("max-speed", Number),
        ("part", Text),
        ("pci_device", Word),
        ("pcidev", Word),
        ("port_type", Number),
        ("processor-family", Number),
        ("processor-id", Number),
        ("product", Text),
        ("release", Text),
        ("serial", Text),
        ("sku", Text),
        ("slot_characteristics1", Number),
        ("slot_characteristics2", Number),
        ("slot_data_bus_width", Number),
        ("slot_designation", Text),
        ("slot_id", Number),
        ("slot_length", Number),
        ("slot_type", Number),
        ("sock_pfx", Text),
        ("speed", Number),
        ("type", Number),
        ("uefi", Switch),
        ("uuid", Word),
        ("value", Text),
        ("vendor", Text),
        ("version", Text),
    ],
    repeated: "value",
};

/// `-fw_cfg`, and what `-boot splash=` becomes.
pub(crate) const FW_CFG: Family = Family {
    name: "fw_cfg",
    keys: &[("content", Bytes), ("name", Text), ("string", Text)],
    repeated: "",
};

/// `-numa`.
pub(crate) const NUMA: Family = Family {
    name: "numa",
    keys: &[
        ("associativity", OneOf(&["none", "direct", "complex"])),
        ("bandwidth", Number),
        ("cluster-id", Number),
        ("core-id", Number),
        ("cpus", Word),
        (
            "data-type",
            OneOf(&[
                "access-latency",
                "read-latency",
                "write-latency",
                "access-bandwidth",
                "read-bandwidth",
                "write-bandwidth",
            ]),
        ),
        ("die-id", Number),
        ("dst", Number),
        (
            "hierarchy",
            OneOf(&["memory", "first-level", "second-level", "third-level"]),
        ),
        ("initiator", Number),
        ("latency", Number),
        ("level", Number),
        ("line", Number),
        ("mem", Number),
        ("memdev", Word),
        ("module-id", Number),
        ("node-id", Number),
        ("nodeid", Number),
        ("policy", OneOf(&["none", "write-back", "write-through"])),
        ("size", Number),
        ("socket-id", Number),
        ("src", Number),
        ("target", Number),
        ("thread-id", Number),
        (
            "type",
            OneOf(&["node", "dist", "cpu", "hmat-lb", "hmat-cache"]),
        ),
        ("val", Number),
    ],
    repeated: "cpus",
};

/// Memory objects beside the main one.
pub(crate) const RAM: Family = Family {
    name: "ram",
    keys: &[
        ("huge-page-mib", Number),
        ("id", Word),
        ("kind", OneOf(&["memfd", "ram"])),
        ("named-by", OneOf(&["id", "path"])),
        ("share", Switch),
        ("size", Number),
    ],
    repeated: "",
};

/// `-fsdev`: a folder of the host that the guest sees by 9p. `folder` is its name in each host's
/// configuration.
pub(crate) const FSDEV: Family = Family {
    name: "fsdev",
    keys: &[
        ("dmode", Number),
        ("fmode", Number),
        ("folder", Word),
        ("id", Word),
        ("multidevs", OneOf(&["remap", "forbid", "warn"])),
        ("readonly", Switch),
        (
            "security_model",
            OneOf(&[
                "passthrough",
                "mapped-xattr",
                "mapped-file",
                "mapped",
                "none",
            ]),
        ),
        ("writeout", OneOf(&["immediate"])),
    ],
    repeated: "",
};

impl Family {
    /// Returns the option's name.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the values that a key takes.
    pub(crate) fn key(&self, key: &str) -> Option<Kind> {
        let known = self.keys.iter().find(|(known, _)| *known == key);
        known.map(|(_, kind)| *kind)
    }

    /// Adds an option with these keys and values to a machine's settings.
    pub(crate) fn add(
        &self,
        settings: &mut BTreeMap<String, String>,
        pairs: impl IntoIterator<Item = (String, String)>,
    ) {
        let number = self.options(settings).len();
        let prefix = format!("{}.{number:03}.", self.name);
        for (key, value) in pairs {
            let mut name = format!("{prefix}{key}");
            if key == self.repeated && settings.contains_key(&name) {
                let others = format!("{name}.");
                let others = settings.keys().filter(|name| name.starts_with(&others));
                name = format!("{name}.{:03}", others.count() + 1);
            }
            settings.insert(name, value);
        }
    }

    /// Returns the keys and values of each option, in their order.
    pub(crate) fn options<'a>(
        &self,
        settings: &'a BTreeMap<String, String>,
    ) -> Vec<Vec<(&'a str, &'a str)>> {
        let mut options: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
        for (name, value) in settings {
            let rest = name.strip_prefix(self.name);
            let rest = rest.and_then(|rest| rest.strip_prefix('.'));
            let Some((number, key)) = rest.and_then(|rest| rest.split_once('.')) else {
                continue;
            };
            options.entry(number).or_default().push((key, value));
        }
        options.into_values().collect()
    }

    /// Returns the values that a setting of this family takes, by what follows the family's name.
    fn setting(&self, rest: &str) -> Option<Kind> {
        let (number, key) = rest.split_once('.')?;
        let key = match key.split_once('.') {
            Some((key, again)) if key == self.repeated => is_count(again).then_some(key)?,
            Some(_) => return None,
            None => key,
        };
        is_count(number).then(|| self.key(key)).flatten()
    }
}

fn is_count(text: &str) -> bool {
    text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns the values that a setting takes.
pub(crate) fn setting(name: &str) -> Option<Kind> {
    let (family, rest) = name.split_once('.')?;
    let mut families = FAMILIES.iter();
    families.find(|known| known.name == family)?.setting(rest)
}

/// Returns whether the options of all families keep to their limits.
pub(crate) fn are_sound(hardware: &Hardware) -> bool {
    let settings = &hardware.settings;
    let few = |family: &Family| family.options(settings).len() <= OPTIONS_MAX;
    let has_content = |name: &str| name.ends_with(".content") || name == SPLASH;
    let contents = settings.iter().filter(|(name, _)| has_content(name));
    let bytes: usize = contents.map(|(_, text)| content::length(text)).sum();
    let complete = |family: &Family, keys: &[&str]| {
        let options = family.options(settings);
        let mut options = options.iter();
        options.all(|option| {
            keys.iter()
                .all(|key| option.iter().any(|(has, _)| has == key))
        })
    };
    let filled = FW_CFG.options(settings);
    let filled = filled.iter().all(|option| option.len() == 2);
    let sizes = RAM.options(settings);
    let mut sizes = sizes.iter().flatten().filter(|(key, _)| *key == "size");
    let bytes_max = MEMORY_MIB_MAX << 20;
    let sized = sizes.try_fold(0_u64, |sum, (_, size)| {
        let sum = sum.checked_add(size.parse().ok()?)?;
        (sum <= bytes_max).then_some(sum)
    });
    FAMILIES.iter().all(few)
        && sized.is_some()
        && bytes <= CONTENTS_BYTES_MAX
        && filled
        && complete(&FW_CFG, &["name"])
        && complete(&RAM, &["id", "kind", "size"])
        && complete(&FSDEV, &["folder", "id"])
}

/// Returns the names of the folders that a machine shares with its host.
pub(crate) fn folders(hardware: &Hardware) -> impl Iterator<Item = &str> {
    let options = FSDEV.options(&hardware.settings).into_iter().flatten();
    options.filter_map(|(key, name)| (key == "folder").then_some(name))
}

/// Emits the folders of the host, which `path` finds by their names.
pub(crate) fn folder_arguments<E>(
    line: &mut Line,
    hardware: &Hardware,
    path: impl Fn(&str) -> Result<String, E>,
) -> Result<(), E> {
    for option in FSDEV.options(&hardware.settings) {
        let mut text = "local".to_owned();
        for (key, value) in option {
            let (key, value) = match key {
                "folder" => ("path", path(value)?),
                key => (key, value.to_owned()),
            };
            text.push_str(&format!(",{}", written(&[(key, &value)])));
        }
        line.option("-fsdev", text);
    }
    Ok(())
}

/// Emits the options of all families.
pub(crate) fn arguments(line: &mut Line, hardware: &Hardware, run: &Path) {
    let settings = &hardware.settings;
    for option in RAM.options(settings) {
        line.option("-object", memory_object(&option));
    }
    for family in [&NUMA, &SMBIOS] {
        for option in family.options(settings) {
            line.option(&format!("-{}", family.name), written(&option));
        }
    }
    for (number, option) in FW_CFG.options(settings).into_iter().enumerate() {
        let file = content_file(run, number).to_string_lossy().into_owned();
        let pairs = option.into_iter().map(|(key, value)| match key {
            "content" => ("file", file.as_str()),
            key => (key, value),
        });
        line.option("-fw_cfg", written(&pairs.collect::<Vec<_>>()));
    }
}

/// Returns the files that the options name, with their contents.
pub(crate) fn contents(hardware: &Hardware, run: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let options = FW_CFG.options(&hardware.settings);
    let contents = options.iter().enumerate().filter_map(|(number, option)| {
        let (_, text) = option.iter().find(|(key, _)| *key == "content")?;
        Some((content_file(run, number), content::read(text)?))
    });
    let splash = hardware.settings.get(SPLASH);
    let splash = splash.and_then(|text| Some((splash_file(run), content::read(text)?)));
    let mut contents: Vec<_> = contents.collect();
    contents.extend(splash);
    contents
}

/// Returns the file of the picture that SeaBIOS shows.
pub(crate) fn splash_file(run: &Path) -> PathBuf {
    run.join("splash")
}

fn content_file(run: &Path, number: usize) -> PathBuf {
    run.join(format!("fw_cfg-{number:03}"))
}

/// Returns keys and values as QEMU parses them.
fn written(pairs: &[(&str, &str)]) -> String {
    let pair = |(key, value): &(&str, &str)| {
        let key = key.split('.').next().unwrap_or(key);
        format!("{key}={}", value.replace(',', ",,"))
    };
    pairs.iter().map(pair).collect::<Vec<_>>().join(",")
}

fn memory_object(option: &[(&str, &str)]) -> String {
    let of = |key: &str| option.iter().find(|(known, _)| *known == key);
    let value = |key: &str| of(key).map_or("", |(_, value)| *value);
    let mut text = format!(
        "memory-backend-{},id={},size={},share={}",
        value("kind"),
        value("id"),
        value("size"),
        of("share").map_or("off", |(_, value)| *value),
    );
    if let Some((_, pages)) = of("huge-page-mib") {
        text.push_str(&format!(",hugetlb=on,hugetlbsize={pages}M"));
    }
    if let Some((_, by)) = of("named-by") {
        text.push_str(&by_path(*by == "path"));
    }
    text
}

/// Returns the setting of a memory object that names its RAM block by its path, or by its id.
pub(crate) fn by_path(by_path: bool) -> String {
    let value = if by_path { "on" } else { "off" };
    format!(",x-use-canonical-path-for-ramblock-id={value}")
}

#[cfg(test)]
#[path = "families_tests.rs"]
mod tests;
