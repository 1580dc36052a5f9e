//! Interprets options whose effect is a setting of the machine, and those without weight.

use super::options::{CommandLine, Late, Meaning, shown};
use super::words::Words;
use crate::hardware::families::{Family, NUMA, SMBIOS};
use crate::hardware::more::LIMITS;
use crate::hardware::tables::Kind;
use crate::observe::Blocker;

use Meaning::{Local, Machine, Never};

const FILE_HERE: &str = "it is a file of this host, which the destination does not have";
const NO_PC: &str = "no PC has it";
const WITHOUT: &str = "start the guest without it";

/// Options beside those of [`super::options`]: the name, whether a word follows it, its meaning.
pub(super) const OPTIONS: &[(&str, bool, Meaning)] = &[
    ("add-fd", true, Local),
    ("alt-grab", false, Local),
    ("async-teardown", false, Local),
    ("audio", true, Machine),
    ("audio-help", false, Local),
    ("audiodev", true, Local),
    ("balloon", true, Machine),
    ("chroot", true, Local),
    ("compat", true, Local),
    ("ctrl-grab", false, Local),
    ("curses", false, Local),
    ("debugcon", true, Machine),
    ("dfilter", true, Local),
    ("dtb", true, Never(NO_PC, WITHOUT)),
    ("dump-vmstate", true, Local),
    ("echr", true, Local),
    ("enable-fips", false, Local),
    ("enable-sync-profile", false, Local),
    ("fw_cfg", true, Machine),
    ("g", true, Local),
    ("h", false, Local),
    ("help", false, Local),
    ("iscsi", true, Local),
    ("jitdump", false, Local),
    ("localtime", false, Machine),
    ("mem-path", true, Local),
    ("mtdblock", true, Never(NO_PC, WITHOUT)),
    ("no-frame", false, Local),
    ("no-kvm", false, Local),
    ("no-kvm-irqchip", false, Machine),
    ("no-kvm-pit-reinjection", false, Machine),
    ("no-quit", false, Local),
    ("nodefconfig", false, Local),
    ("numa", true, Machine),
    ("one-insn-per-tb", false, Local),
    ("option-rom", true, Never(FILE_HERE, WITHOUT)),
    ("perfmap", false, Local),
    ("plugin", true, Local),
    ("portrait", false, Local),
    ("preconfig", false, Local),
    ("prom-env", true, Never(NO_PC, WITHOUT)),
    ("realtime", true, Local),
    ("rotate", true, Local),
    ("rtc-td-hack", false, Machine),
    ("sdl", false, Local),
    ("seed", true, Local),
    ("set", true, Machine),
    ("shim", true, Never(FILE_HERE, WITHOUT)),
    ("singlestep", false, Local),
    ("smbios", true, Machine),
    ("soundhw", true, Machine),
    ("spice", true, Local),
    ("tb-size", true, Local),
    ("tdf", false, Machine),
    ("version", false, Local),
    ("watchdog", true, Machine),
    ("win2k-hack", false, Local),
    ("writeconfig", true, Local),
    ("xen-attach", false, Never("it is a guest of Xen", WITHOUT)),
    ("xen-domid", true, Never("it is a guest of Xen", WITHOUT)),
    (
        "xen-domid-restrict",
        false,
        Never("it is a guest of Xen", WITHOUT),
    ),
];

/// Objects that are not part of the guest, or of which QEMU reports what matters.
const LOCAL_OBJECTS: [&str; 27] = [
    "authz-list",
    "authz-list-file",
    "authz-pam",
    "authz-simple",
    "can-bus",
    "can-host-socketcan",
    "filter-dump",
    "input-barrier",
    "input-linux",
    "iommufd",
    "iothread",
    "main-loop",
    "memory-backend-file",
    "memory-backend-memfd",
    "memory-backend-ram",
    "memory-backend-shm",
    "qtest",
    "rng-builtin",
    "rng-egd",
    "rng-random",
    "secret",
    "secret_keyring",
    "thread-context",
    "throttle-group",
    "tls-cipher-suites",
    "tls-creds-anon",
    "tls-creds-psk",
];

/// A file of the machine's firmware interface (`-fw_cfg`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FirmwareFile {
    pub(super) name: String,
    pub(super) content: Content,
}

/// Its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    Text(String),
    /// That of a file of this host.
    File(String),
}

/// Returns whether an object of the command line needs no counterpart at the destination, or one
/// that is made from QEMU's own report.
pub(super) fn is_local_object(kind: &str) -> bool {
    LOCAL_OBJECTS.contains(&kind) || kind == "tls-creds-x509"
}

/// Returns whether a word of a `-drive` limits its requests: QEMU reports the limits themselves.
pub(super) fn is_limit(key: &str) -> bool {
    key.starts_with("throttling.") || LIMITS.contains(&key)
}

impl CommandLine {
    /// Interprets one of these options; returns false for others.
    pub(super) fn more(&mut self, name: &str, value: &str, late: &mut Late) -> bool {
        match name {
            "audio" => {
                if let Some(model) = Words::read(value, "driver").get("model") {
                    self.setting("audio.model", &model.to_ascii_lowercase());
                }
            }
            "soundhw" => self.sound(value),
            "balloon" if value == "none" => {}
            "balloon" => {
                let mut words = Words::read(value, "type");
                words.take("type");
                words.put("driver", "virtio-balloon");
                late.drives.push(words);
            }
            "boot" => self.boot(value),
            "debugcon" => {
                let mut words = Words::default();
                words.put("driver", "isa-debugcon");
                words.put("id", "debugcon");
                late.drives.push(words);
            }
            "watchdog" => {
                let mut words = Words::default();
                words.put("driver", value);
                late.drives.push(words);
            }
            "fsdev" => self.folder(Words::read(value, "fsdriver")),
            "fw_cfg" => self.firmware_file(&Words::read(value, "name")),
            "localtime" => self.setting("rtc.base", "localtime"),
            "rtc-td-hack" | "tdf" => self.setting("rtc.driftfix", "slew"),
            "no-kvm-irqchip" => self.setting("machine.kernel-irqchip", "off"),
            "no-kvm-pit-reinjection" => {
                self.setting("global.kvm-pit.lost_tick_policy", "discard");
            }
            "m" => self.memory_words(value),
            "numa" => self.family(&NUMA, &Words::read(value, "type")),
            "smbios" => self.smbios(&Words::read(value, "")),
            "set" => self.set(value),
            "virtfs" => {
                let mut words = Words::read(value, "fsdriver");
                let tag = words.take("mount_tag").unwrap_or_default();
                let id = words.take("id").unwrap_or_else(|| tag.clone());
                words.put("id", &id);
                self.folder(words);
                let mut device = Words::default();
                device.put("driver", "virtio-9p-pci");
                device.put("fsdev", &id);
                device.put("mount_tag", &tag);
                self.devices.push(device);
            }
            "global" => self.global(value),
            _ => return false,
        }
        true
    }

    /// Adds an option to a family; refuses by name what cannot be made again.
    fn family(&mut self, family: &Family, words: &Words) {
        match pairs(family, words) {
            Ok(pairs) => family.add(&mut self.settings, pairs),
            Err(refusals) => self.refusals.extend(refusals),
        }
    }

    fn smbios(&mut self, words: &Words) {
        for key in ["file", "path"] {
            if words.get(key).is_some() {
                self.refuse(
                    format!("option -smbios of its command line has {key}=: {FILE_HERE}"),
                    "write its content as keys and values (type=N,KEY=VALUE)",
                );
                return;
            }
        }
        self.family(&SMBIOS, words);
    }

    fn folder(&mut self, mut words: Words) {
        match words.take("fsdriver").as_deref() {
            Some("local") => self.folders.push(words),
            driver => self.refuse(
                format!(
                    "option -fsdev of its command line: driver {} serves no folder of the host",
                    shown(driver.unwrap_or("?"))
                ),
                "use `local`, or start the guest without it",
            ),
        }
    }

    fn firmware_file(&mut self, words: &Words) {
        let name = words.get("name").unwrap_or_default().to_owned();
        let content = match (words.get("string"), words.get("file")) {
            (Some(text), _) => Content::Text(text.to_owned()),
            (None, Some(file)) => Content::File(file.to_owned()),
            (None, None) => {
                let key = words.iter().find(|(key, _)| *key != "name");
                let key = key.map_or("nothing", |(key, _)| key);
                self.refuse(
                    format!(
                        "option -fw_cfg of its command line: {} has its content by {}",
                        shown(&name),
                        shown(key)
                    ),
                    "use string= or file=",
                );
                return;
            }
        };
        self.firmware_files.push(FirmwareFile { name, content });
    }

    fn boot(&mut self, value: &str) {
        let mut words = Words::read(value, "order");
        self.splash = words.take("splash").or(self.splash.take());
        self.settings_of("boot", words, &[]);
    }

    fn memory_words(&mut self, value: &str) {
        let mut words = Words::read(value, "size");
        words.take("size");
        self.settings_of("memory", words, &[]);
    }

    fn sound(&mut self, value: &str) {
        let models: Vec<&str> = value.split(',').filter(|model| *model != "pcspk").collect();
        match models.as_slice() {
            [] => {}
            [model] => self.setting("audio.model", model),
            _ => self.refuse(
                format!(
                    "option -soundhw of its command line names several cards ({})",
                    shown(value)
                ),
                "start the guest with a `-device` for each",
            ),
        }
    }

    /// `-set device.ID.KEY=VALUE`
    fn set(&mut self, value: &str) {
        let parts = value.split_once('=').and_then(|(name, value)| {
            let mut parts = name.splitn(3, '.');
            Some((parts.next()?, parts.next()?, parts.next()?, value))
        });
        if let Some(("device", id, key, value)) = parts
            && let Some(words) = self
                .devices
                .iter_mut()
                .find(|words| words.get("id") == Some(id))
        {
            words.take(key);
            words.put(key, value);
            return;
        }
        self.refuse(
            format!(
                "option -set {} of its command line is not understood",
                shown(value)
            ),
            "write the property at its device",
        );
    }

    fn global(&mut self, value: &str) {
        let words = Words::read(value, "");
        let of = |key| words.get(key).unwrap_or_default();
        let (driver, property, value) = match (words.get("driver"), value.split_once('=')) {
            (Some(driver), _) => (driver, of("property"), of("value")),
            (None, Some((name, value))) => {
                let (driver, property) = name.split_once('.').unwrap_or((name, ""));
                (driver, property, value)
            }
            (None, None) => (value, "", ""),
        };
        match driver {
            // Of QEMU's migration at this host.
            "migration" => {}
            // QEMU takes all before the first dot as the class, and there is none of that name.
            "cfi" => {}
            driver => self.setting(&format!("global.{driver}.{property}"), value),
        }
    }
}

/// Returns the keys and values of an option of a family, or why it cannot be made again.
pub(super) fn pairs(family: &Family, words: &Words) -> Result<Vec<(String, String)>, Vec<Blocker>> {
    let pairs: Vec<_> = words.iter().collect();
    let fits = |(key, value): &&(&str, &str)| {
        let kind = family.key(key);
        kind.is_some_and(|kind| kind.takes(&kind.normal(value)))
    };
    let refusals: Vec<Blocker> = pairs
        .iter()
        .filter(|pair| !fits(pair))
        .map(|(key, value)| Blocker {
            text: format!(
                "option -{} of its command line: {}={} cannot be made again elsewhere",
                family.name(),
                shown(key),
                shown(value)
            ),
            hint: WITHOUT.to_owned(),
        })
        .collect();
    if !refusals.is_empty() {
        return Err(refusals);
    }
    let normal = |(key, value): (&str, &str)| {
        let kind = family.key(key)?;
        Some((key.to_owned(), kind.normal(value)))
    };
    Ok(pairs.into_iter().filter_map(normal).collect())
}

/// Returns a setting of a CPU beside features and numbers, in the description's form.
pub(super) fn cpu_text(name: &str, value: &str) -> Option<String> {
    let name = name.replace('_', "-");
    crate::description::is_cpu_text(&name, value).then(|| format!("{name}={value}"))
}

/// Returns whether a text can travel as one of a description's.
pub(super) fn is_text(text: &str) -> bool {
    Kind::Text.takes(text)
}

#[cfg(test)]
#[path = "more_options_tests.rs"]
mod tests;
