//! Interprets the options of QEMU's command line: what each means for a move, and which prevent
//! one.

use super::drives;
use super::more_options::{self, FirmwareFile, cpu_text, is_local_object};
use super::words::{WORDS_MAX, Words};
use crate::description::is_cpu_setting;
use crate::hardware::tables::{is_word, setting};
use crate::observe::Blocker;
use std::collections::BTreeMap;

/// The content of a command line.
#[derive(Debug, Default)]
pub(super) struct CommandLine {
    /// Settings of the machine, by their names in the hardware tables.
    pub(super) settings: BTreeMap<String, String>,
    /// The CPU, in the description's form.
    pub(super) cpu: Option<String>,
    /// Devices in the order of their creation.
    pub(super) devices: Vec<Words>,
    /// Drives.
    pub(super) drives: Vec<Words>,
    /// Network backends, in the order of their creation.
    pub(super) netdevs: Vec<Words>,
    /// Objects by id.
    pub(super) objects: BTreeMap<String, Words>,
    /// The memory backend object.
    pub(super) memory_backend: Option<String>,
    /// Paths for direct kernel boot.
    pub(super) kernel: Option<String>,
    pub(super) initrd: Option<String>,
    pub(super) append: Option<String>,
    /// Path of the firmware.
    pub(super) bios: Option<String>,
    /// Files of the firmware interface.
    pub(super) firmware_files: Vec<FirmwareFile>,
    /// Folders of this host (`-fsdev`).
    pub(super) folders: Vec<Words>,
    /// Paths of the sockets of character devices, by their ids.
    pub(super) sockets: BTreeMap<String, String>,
    /// The character device of the TPM.
    pub(super) tpm: Option<String>,
    /// The version of the TPM, if it is known.
    pub(super) tpm_version: Option<&'static str>,
    /// Path of the picture that SeaBIOS shows.
    pub(super) splash: Option<String>,
    /// The reasons why the guest cannot be launched elsewhere.
    pub(super) refusals: Vec<Blocker>,
}

/// The meaning of an option for a move.
#[derive(Debug, Clone, Copy)]
pub(super) enum Meaning {
    /// It concerns this host only, or QEMU reports its effect.
    Local,
    /// It is part of the machine.
    Machine,
    /// It prevents a move: the reason, and what to do.
    Never(&'static str, &'static str),
}

use Meaning::{Local, Machine, Never};

const FILE_HERE: &str = "it is a file of this host, which the destination does not have";
const NOT_YET: &str = "this is not supported for guests that something else started";
const WITHOUT: &str = "start the guest without it";

/// Every known option, whether a word follows it, and its meaning.
pub(super) const OPTIONS: &[(&str, bool, Meaning)] = &[
    ("D", true, Local),
    ("L", true, Local),
    ("S", false, Local),
    ("M", true, Machine),
    ("accel", true, Machine),
    ("acpitable", true, Never(FILE_HERE, WITHOUT)),
    ("action", true, Machine),
    ("append", true, Machine),
    ("bios", true, Machine),
    ("blockdev", true, Machine),
    ("boot", true, Machine),
    ("cdrom", true, Local),
    ("chardev", true, Machine),
    ("cpu", true, Machine),
    ("d", true, Local),
    ("daemonize", false, Local),
    ("device", true, Machine),
    ("display", true, Local),
    ("drive", true, Machine),
    ("enable-kvm", false, Local),
    ("fda", true, Local),
    ("fdb", true, Local),
    ("fsdev", true, Machine),
    ("full-screen", false, Local),
    ("gdb", true, Local),
    ("global", true, Machine),
    ("hda", true, Local),
    ("hdb", true, Local),
    ("hdc", true, Local),
    ("hdd", true, Local),
    ("icount", true, Never(NOT_YET, WITHOUT)),
    ("incoming", true, Local),
    ("initrd", true, Machine),
    ("k", true, Local),
    ("kernel", true, Machine),
    ("loadvm", true, Never(NOT_YET, WITHOUT)),
    ("m", true, Machine),
    ("machine", true, Machine),
    ("mem-prealloc", false, Local),
    ("mon", true, Local),
    ("monitor", true, Local),
    ("msg", true, Local),
    ("name", true, Local),
    ("net", true, Machine),
    ("netdev", true, Machine),
    ("nic", true, Machine),
    ("no-acpi", false, Machine),
    ("no-fd-bootchk", false, Machine),
    ("no-hpet", false, Machine),
    ("no-reboot", false, Machine),
    ("no-shutdown", false, Machine),
    ("no-user-config", false, Local),
    ("nodefaults", false, Local),
    ("nographic", false, Local),
    ("object", true, Machine),
    ("only-migratable", false, Local),
    ("overcommit", true, Local),
    ("parallel", true, Local),
    ("pflash", true, Machine),
    ("pidfile", true, Local),
    ("qmp", true, Local),
    ("qmp-pretty", true, Local),
    // Its content stands in its place already.
    ("readconfig", true, Local),
    ("rtc", true, Machine),
    ("run-with", true, Local),
    ("runas", true, Local),
    ("s", false, Local),
    ("sandbox", true, Local),
    ("sd", true, Never("a PC has no drive for SD cards", WITHOUT)),
    ("serial", true, Machine),
    ("smp", true, Local),
    (
        "snapshot",
        false,
        Never(
            "what the guest writes is in a hidden file of this host",
            WITHOUT,
        ),
    ),
    ("tpmdev", true, Machine),
    ("trace", true, Local),
    ("usb", false, Machine),
    ("usbdevice", true, Machine),
    ("uuid", true, Local),
    ("vga", true, Local),
    ("virtfs", true, Machine),
    ("vnc", true, Local),
    ("watchdog-action", true, Machine),
];

impl CommandLine {
    /// Parses a command line, without the program.
    pub(super) fn read(words: &[String]) -> Self {
        let mut line = Self::default();
        if let Some(manager) = manager(words) {
            line.refusals.push(manager);
            return line;
        }
        if words.len() > WORDS_MAX {
            line.refuse(
                format!("its command line has more than {WORDS_MAX} words"),
                WITHOUT,
            );
            return line;
        }
        let mut words = words.iter().peekable();
        let mut late = Late::default();
        while let Some(word) = words.next() {
            // A word by itself is a disk, which QEMU is asked for.
            let Some(name) = word.strip_prefix("--").or(word.strip_prefix('-')) else {
                continue;
            };
            let mut options = OPTIONS.iter().chain(more_options::OPTIONS);
            let known = options.find(|(known, _, _)| *known == name);
            let Some((_, takes, meaning)) = known else {
                line.refuse(
                    format!("option -{} of its command line is not known", shown(name)),
                    "start the guest without it, or move it while it is shut down",
                );
                words.next_if(|next| !next.starts_with('-'));
                continue;
            };
            let value = match takes {
                true => words.next().map(String::as_str).unwrap_or_default(),
                false => "",
            };
            match meaning {
                Local => {}
                Never(why, hint) => {
                    line.refuse(format!("option -{name} of its command line: {why}"), hint)
                }
                Machine => line.option(name, value, &mut late),
            }
        }
        line.devices.append(&mut late.drives);
        line.devices.append(&mut late.devices);
        line
    }

    /// Returns the path of the socket of the TPM's emulator.
    pub(super) fn tpm_socket(&self) -> Option<&str> {
        let path = self.sockets.get(self.tpm.as_ref()?);
        path.map(String::as_str)
    }

    pub(super) fn refuse(&mut self, text: String, hint: &str) {
        self.refusals.push(Blocker {
            text,
            hint: hint.to_owned(),
        });
    }

    fn option(&mut self, name: &str, value: &str, late: &mut Late) {
        if self.more(name, value, late) {
            return;
        }
        match name {
            "M" | "machine" => self.machine(value),
            "accel" => self.accel(value),
            "append" => self.append = Some(value.to_owned()),
            "bios" => self.bios = Some(value.to_owned()),
            "kernel" => self.kernel = Some(value.to_owned()),
            "initrd" => self.initrd = Some(value.to_owned()),
            "cpu" => self.cpu(value),
            "rtc" => self.settings_of("rtc", Words::read(value, "base"), &[]),
            "action" => self.settings_of("action", Words::read(value, ""), &[]),
            "watchdog-action" => self.setting("action.watchdog", value),
            "no-acpi" => self.setting("machine.acpi", "off"),
            "no-fd-bootchk" => self.setting("machine.fd-bootchk", "off"),
            "no-hpet" => self.setting("machine.hpet", "off"),
            "no-reboot" => self.setting("action.reboot", "shutdown"),
            "no-shutdown" => self.setting("action.shutdown", "pause"),
            "usb" => self.setting("machine.usb", "on"),
            "object" => self.object(value),
            "device" => self.device(value, late),
            "blockdev" => self.blockdev(value),
            "drive" => self.drive(Words::read(value, "file"), late),
            "pflash" => {
                let mut words = Words::default();
                words.put("file", value);
                words.put("if", "pflash");
                self.drive(words, late);
            }
            // QEMU is asked for the cards themselves.
            "netdev" | "nic" | "net" => self.netdevs.push(Words::read(value, "type")),
            "usbdevice" => self.usb_device(value),
            "chardev" => self.chardev(Words::read(value, "backend")),
            "tpmdev" => self.tpmdev(Words::read(value, "type")),
            // Serial and parallel ports: QEMU reports how many there are.
            _ => {}
        }
    }

    /// Records a setting that the tables know; refuses any other by name.
    pub(super) fn setting(&mut self, name: &str, value: &str) {
        match setting(name) {
            Some(kind) if kind.takes(&kind.normal(value)) => {
                self.settings.insert(name.to_owned(), kind.normal(value));
            }
            Some(_) => self.refuse(
                format!(
                    "setting {name} of its command line has the value `{}`, which cannot be \
                     made again",
                    shown(value)
                ),
                "start the guest with another value",
            ),
            None => self.refuse(
                format!("setting {} of its command line is not known", shown(name)),
                WITHOUT,
            ),
        }
    }

    pub(super) fn settings_of(&mut self, prefix: &str, words: Words, local: &[&str]) {
        for (key, value) in words.iter().filter(|(key, _)| !local.contains(key)) {
            self.setting(&format!("{prefix}.{key}"), value);
        }
    }

    fn machine(&mut self, value: &str) {
        const LOCAL: [&str; 10] = [
            "type",
            "accel",
            "aux-ram-share",
            "dump-guest-core",
            "enforce-config-section",
            "mem-merge",
            "kvm-shadow-mem",
            "pcspk-audiodev",
            "pflash0",
            "suppress-vmdesc",
        ];
        let mut words = Words::read(value, "type");
        if let Some(memory) = words.take("memory-backend") {
            self.memory_backend = Some(memory);
        }
        for (key, value) in words.iter() {
            let key = key.replace('_', "-");
            match key.as_str() {
                // QEMU is asked whether the memory is encrypted.
                "confidential-guest-support" | "memory-encryption" | "pflash1" => {}
                key if LOCAL.contains(&key) => {}
                "nvdimm" if value == "off" => {}
                key => self.setting(&format!("machine.{key}"), value),
            }
        }
    }

    fn accel(&mut self, value: &str) {
        const LOCAL: [&str; 8] = [
            "accel",
            "dirty-ring-size",
            "notify-vmexit",
            "one-insn-per-tb",
            "thread",
            "tb-size",
            "kvm-shadow-mem",
            "split-wx",
        ];
        for (key, value) in Words::read(value, "accel").iter() {
            match key {
                key if LOCAL.contains(&key) => {}
                "kernel-irqchip" => self.setting("machine.kernel-irqchip", value),
                key => self.refuse(
                    format!("accelerator setting {} is not known", shown(key)),
                    WITHOUT,
                ),
            }
        }
    }

    fn cpu(&mut self, value: &str) {
        let mut parts = value.split(',');
        let mut cpu = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let part = match part.split_once('=') {
                None if part.starts_with(['+', '-']) => part.to_owned(),
                None => format!("{part}=on"),
                Some((name, "on" | "true" | "yes")) => format!("{name}=on"),
                Some((name, "off" | "false" | "no")) => format!("{name}=off"),
                Some((name, value)) => match cpu_text(name, value) {
                    Some(text) => text,
                    None => format!("{}={value}", name.replace('_', "-")),
                },
            };
            match part.as_str() {
                // These decide whether QEMU starts, and are invisible to the guest.
                "check=on" | "check=off" | "enforce=on" | "enforce=off" => {}
                part if is_cpu_setting(part) => {
                    cpu.push(',');
                    cpu.push_str(part);
                }
                part => self.refuse(
                    format!(
                        "CPU setting {} of its command line cannot be made again",
                        shown(part)
                    ),
                    "start the guest without it",
                ),
            }
        }
        self.cpu = Some(cpu);
    }

    fn object(&mut self, value: &str) {
        let words = Words::read(value, "qom-type");
        let kind = words.get("qom-type").unwrap_or_default().to_owned();
        // QEMU is asked whether the memory is encrypted.
        let asked = ["sev-guest", "sev-snp-guest", "tdx-guest"];
        if !is_local_object(&kind) && !asked.contains(&kind.as_str()) {
            self.refuse(
                format!(
                    "object {} cannot be made again at the destination",
                    shown(&kind)
                ),
                WITHOUT,
            );
        }
        if let Some(id) = words.get("id") {
            self.objects.insert(id.to_owned(), words.clone());
        }
    }

    fn device(&mut self, value: &str, late: &mut Late) {
        let words = Words::read(value, "driver");
        match value.starts_with('{') {
            true => late.devices.push(words),
            false => self.devices.push(words),
        }
    }

    fn usb_device(&mut self, value: &str) {
        self.setting("machine.usb", "on");
        if !matches!(value, "keyboard" | "mouse" | "tablet") {
            self.refuse(
                format!("-usbdevice {} cannot be made again", shown(value)),
                WITHOUT,
            );
        }
    }

    /// At the destination every device has a socket of its own, whatever it has here.
    fn chardev(&mut self, words: Words) {
        if words.get("backend") == Some("qemu-vdagent") {
            self.refuse(
                "character device qemu-vdagent cannot be made again".to_owned(),
                WITHOUT,
            );
        }
        if let (Some(id), Some(path)) = (words.get("id"), words.get("path")) {
            self.sockets.insert(id.to_owned(), path.to_owned());
        }
    }

    /// At the destination, the TPM has an emulator of its own, which gets its state from QEMU.
    fn tpmdev(&mut self, words: Words) {
        match words.get("type") {
            Some("emulator") => self.tpm = words.get("chardev").map(str::to_owned),
            _ => self.refuse(
                "option -tpmdev of its command line: the TPM is a piece of this host's hardware"
                    .to_owned(),
                "start the guest with an emulated TPM (-tpmdev emulator), or without one",
            ),
        }
    }

    fn descriptor(&mut self, option: &str, words: &Words) {
        if let Some(key) = words.descriptor() {
            self.refuse(
                format!(
                    "option -{option} of its command line has {}=: a file descriptor means \
                     nothing on another host",
                    shown(key)
                ),
                "name files, sockets and interfaces by their names",
            );
        }
    }

    fn blockdev(&mut self, value: &str) {
        let words = Words::read(value, "driver");
        self.descriptor("blockdev", &words);
        self.refusals.extend(drives::node(&words));
    }

    fn drive(&mut self, words: Words, late: &mut Late) {
        self.descriptor("drive", &words);
        self.refusals.extend(drives::drive(&words));
        if words.get("if") == Some("virtio") {
            let mut device = Words::default();
            device.put("driver", "virtio-blk-pci");
            late.drives.push(device);
        }
        self.drives.push(words);
    }
}

/// Devices that QEMU creates after the others.
#[derive(Default)]
pub(super) struct Late {
    pub(super) drives: Vec<Words>,
    devices: Vec<Words>,
}

/// Returns the other manager of this guest, where the command line shows one: by the control socket
/// that it made, or by its files beside that.
fn manager(words: &[String]) -> Option<Blocker> {
    const CONTROL: [&str; 6] = ["chardev", "qmp", "monitor", "pidfile", "object", "vnc"];
    let has = |part: &str| {
        words.windows(2).any(|words| {
            let option = words[0].trim_start_matches('-');
            words[0].starts_with('-') && CONTROL.contains(&option) && words[1].contains(part)
        })
    };
    if has("/libvirt/qemu/") {
        return Some(Blocker {
            text: "libvirt manages this guest: it holds QEMU's control socket, and would end or \
                   start the guest behind Longhaul's back"
                .to_owned(),
            hint:
                "it needs no attaching: `longhaul guests` lists it where the agent finds libvirt \
                   (docs/libvirt.md)"
                    .to_owned(),
        });
    }
    has("/qemu-server/").then(|| Blocker {
        text: "Proxmox VE manages this guest: it uses QEMU's control socket, and would start the \
               guest again from its own configuration"
            .to_owned(),
        hint: "it needs no attaching: `longhaul guests` lists it where Proxmox VE is installed \
               (docs/proxmox.md)"
            .to_owned(),
    })
}

/// Returns whether an option has a meaning here.
#[cfg(test)]
pub(super) fn is_known(name: &str) -> bool {
    let mut options = OPTIONS.iter().chain(more_options::OPTIONS);
    options.any(|(known, _, _)| *known == name)
}

/// Returns a text of a command line, safe for display.
pub(super) fn shown(text: &str) -> String {
    if is_word(text) {
        return text.to_owned();
    }
    let start: String = text.chars().take(80).collect();
    start.escape_debug().to_string()
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
