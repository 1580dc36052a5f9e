//! Checks guest descriptions before launch. A peer may send one, so every text is validated before
//! any of it reaches a command line.

use crate::hardware;
use longhaul_protocol::guest::{Channel, Disk, GuestDescription, Nic};
use longhaul_protocol::limits::REGION_BLOCKS_MAX;
use std::collections::BTreeSet;

/// The maximum length of a guest's name (it is part of a socket's path, which Linux limits).
pub const GUEST_NAME_BYTES_MAX: usize = 48;
/// The maximum number of virtual CPUs of a guest.
pub const VCPUS_MAX: u32 = 255;
/// The minimum memory of a guest, in MiB.
pub const MEMORY_MIB_MIN: u64 = 16;
/// The maximum memory of a guest, in MiB: the block limit of a region.
pub const MEMORY_MIB_MAX: u64 = REGION_BLOCKS_MAX / 256;
/// The maximum number of disks of a guest: the PCI slots reserved for them.
pub const DISKS_MAX: usize = 12;
/// The maximum number of network cards of a guest: the PCI slots reserved for them.
pub const NICS_MAX: usize = 8;
/// The maximum number of channels of a guest.
pub const CHANNELS_MAX: usize = 16;
/// The same of an exact machine, whose devices have places of their own: each disk that moves is a
/// region of a migration.
const PLACED_DISKS_MAX: usize = 48;
const PLACED_NICS_MAX: usize = 32;
const PLACED_CHANNELS_MAX: usize = 64;
/// The maximum number of features added to or removed from a CPU model.
pub const CPU_FEATURES_MAX: usize = 256;
/// The maximum length of a kernel command line, in bytes (x86 Linux reads no more).
pub const COMMAND_LINE_BYTES_MAX: usize = 2047;

/// The maximum length of a machine type's version.
const MACHINE_VERSION_BYTES_MAX: usize = 32;

/// Numeric CPU properties that a description may set.
const CPU_NUMBERS: [&str; 21] = [
    "family",
    "guest-phys-bits",
    "host-phys-bits-limit",
    "hv-spinlocks",
    "hv-version-id-build",
    "hv-version-id-major",
    "hv-version-id-minor",
    "hv-version-id-sbranch",
    "hv-version-id-snumber",
    "hv-version-id-spack",
    "level",
    "min-level",
    "min-xlevel",
    "min-xlevel2",
    "model",
    "phys-bits",
    "stepping",
    "tsc-frequency",
    "ucode-rev",
    "xlevel",
    "xlevel2",
];

/// Why no host would launch a description.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("guest description: `{field}` {problem}")]
pub struct DescriptionError {
    /// The wrong field, by its name in the description.
    pub field: String,
    /// The problem, and what to do.
    pub problem: String,
}

/// The two supported machine families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chipset {
    /// `pc-q35-*`.
    Q35,
    /// `pc-i440fx-*`.
    I440fx,
}

impl Chipset {
    /// Returns the family of a machine type of any build of QEMU: `pc-q35-10.0`, `pc-q35-noble`.
    pub fn of(machine: &str) -> Option<Self> {
        [("pc-q35-", Self::Q35), ("pc-i440fx-", Self::I440fx)]
            .into_iter()
            .find_map(|(prefix, chipset)| {
                let version = machine.strip_prefix(prefix)?;
                is_name(version, MACHINE_VERSION_BYTES_MAX).then_some(chipset)
            })
    }

    /// Returns the bus of every device of a description.
    pub fn bus(self) -> &'static str {
        match self {
            Self::Q35 => "pcie.0",
            Self::I440fx => "pci.0",
        }
    }
}

/// Parses a description from TOML and checks it.
pub fn parse(text: &str) -> Result<GuestDescription, ParseError> {
    let description = toml::from_str(text)?;
    check(&description)?;
    Ok(description)
}

/// Why a text is not a valid description.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// It is not TOML of the right shape; the message has line and column.
    #[error("guest description: {0}")]
    Toml(#[from] toml::de::Error),
    /// It is well formed and cannot be launched.
    #[error(transparent)]
    Description(#[from] DescriptionError),
}

/// Checks all properties of a description that do not depend on a host.
pub fn check(description: &GuestDescription) -> Result<(), DescriptionError> {
    name("name", &description.name, GUEST_NAME_BYTES_MAX)?;
    machine(&description.machine)?;
    cpu(&description.cpu)?;
    within("vcpus", u64::from(description.vcpus), 1, VCPUS_MAX.into())?;
    within(
        "memory_mib",
        description.memory_mib,
        MEMORY_MIB_MIN,
        MEMORY_MIB_MAX,
    )?;
    if let Some(firmware) = &description.firmware {
        resolved_name("firmware", firmware)?;
    }
    if let Some(kernel) = &description.kernel {
        resolved_name("kernel.name", &kernel.name)?;
        command_line(&kernel.command_line)?;
    }
    let [disks_max, nics_max, channels_max] = match &description.hardware {
        Some(_) => [PLACED_DISKS_MAX, PLACED_NICS_MAX, PLACED_CHANNELS_MAX],
        None => [DISKS_MAX, NICS_MAX, CHANNELS_MAX],
    };
    count("disks", description.disks.len(), disks_max)?;
    count("nics", description.nics.len(), nics_max)?;
    count("channels", description.channels.len(), channels_max)?;
    disks(&description.disks)?;
    nics(&description.nics)?;
    channels(&description.channels)?;
    match &description.hardware {
        Some(hardware) => hardware::check(description, hardware),
        None => Ok(()),
    }
}

/// Checks a guest's name.
pub fn check_name(text: &str) -> Result<(), DescriptionError> {
    name("name", text, GUEST_NAME_BYTES_MAX)
}

/// Returns whether this is the versioned type of a PC.
pub fn is_machine(machine: &str) -> bool {
    Chipset::of(machine).is_some()
}

fn machine(machine: &str) -> Result<(), DescriptionError> {
    if Chipset::of(machine).is_some() {
        return Ok(());
    }
    let shown = shown(machine);
    refuse(
        "machine",
        format!(
            "is `{shown}`: write a versioned type of a PC, such as pc-q35-10.0 or pc-i440fx-7.2 \
             (a name without a version is another machine on every QEMU)"
        ),
    )
}

/// Checks a CPU: a model, then added features (`+avx`, `avx=on`), removed features (`-avx`,
/// `avx=off`), and numbers (`phys-bits=40`).
fn cpu(cpu: &str) -> Result<(), DescriptionError> {
    let mut parts = cpu.split(',');
    let model = parts.next().unwrap_or_default();
    let features: Vec<&str> = parts.collect();
    let sound = is_name(model, 64)
        && features.len() <= CPU_FEATURES_MAX
        && features.iter().all(|feature| is_cpu_setting(feature));
    if sound {
        return Ok(());
    }
    let shown = shown(cpu);
    refuse(
        "cpu",
        format!(
            "is `{shown}`: write a model, such as EPYC-v4, and after it what is added or taken \
             away, such as EPYC-v4,+avx2,-rdseed"
        ),
    )
}

/// Returns whether this adds a CPU feature, removes one, or sets a numeric property.
pub(crate) fn is_cpu_setting(text: &str) -> bool {
    if let Some(feature) = text.strip_prefix(['+', '-']) {
        return is_name(feature, 64);
    }
    text.split_once('=')
        .is_some_and(|(name, value)| match value {
            "on" | "off" => is_name(name, 64),
            value if is_cpu_text(name, value) => true,
            value => {
                CPU_NUMBERS.contains(&name)
                    && (1..=12).contains(&value.len())
                    && value.bytes().all(|byte| byte.is_ascii_alphanumeric())
            }
        })
}

/// Returns whether this is a property of a CPU that is a text, and its value.
pub(crate) fn is_cpu_text(name: &str, value: &str) -> bool {
    let printable = value.chars().all(|c| c.is_ascii_graphic() || c == ' ') && !value.contains(',');
    let length = match name {
        // QEMU takes no other length.
        "vendor" => 12..=12,
        "hv-vendor-id" => 1..=12,
        "model-id" => 1..=48,
        _ => return false,
    };
    length.contains(&value.len()) && printable
}

fn command_line(text: &str) -> Result<(), DescriptionError> {
    if text.len() > COMMAND_LINE_BYTES_MAX {
        let problem = format!("is longer than {COMMAND_LINE_BYTES_MAX} bytes");
        return refuse("kernel.command_line", problem);
    }
    if !text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        let problem = "holds a character that is not printable ASCII".to_owned();
        return refuse("kernel.command_line", problem);
    }
    Ok(())
}

fn disks(disks: &[Disk]) -> Result<(), DescriptionError> {
    let mut names = BTreeSet::new();
    let mut images = BTreeSet::new();
    for disk in disks {
        name("disks.name", &disk.name, 16)?;
        resolved_name("disks.image", &disk.image)?;
        unique("disks.name", &mut names, &disk.name)?;
        unique("disks.image", &mut images, &disk.image)?;
    }
    Ok(())
}

fn nics(nics: &[Nic]) -> Result<(), DescriptionError> {
    let mut macs = BTreeSet::new();
    for nic in nics {
        resolved_name("nics.network", &nic.network)?;
        if !is_unicast_mac(&nic.mac) {
            let shown = shown(&nic.mac);
            return refuse(
                "nics.mac",
                format!("is `{shown}`: write one card's address, such as 52:54:00:12:34:56"),
            );
        }
        unique("nics.mac", &mut macs, &nic.mac.to_ascii_lowercase())?;
    }
    Ok(())
}

fn channels(channels: &[Channel]) -> Result<(), DescriptionError> {
    let mut names = BTreeSet::new();
    for channel in channels {
        name("channels.name", &channel.name, 40)?;
        unique("channels.name", &mut names, &channel.name)?;
    }
    Ok(())
}

/// Checks a name that is used as it is in paths and on QEMU's command line.
fn name(field: &str, text: &str, bytes_max: usize) -> Result<(), DescriptionError> {
    if is_name(text, bytes_max) {
        return Ok(());
    }
    let shown = shown(text);
    refuse(
        field,
        format!(
            "is `{shown}`: a name has 1 to {bytes_max} letters, digits, `-`, `_` and `.`, and \
             begins with a letter or digit"
        ),
    )
}

/// Checks a name that this host's configuration resolves.
fn resolved_name(field: &str, text: &str) -> Result<(), DescriptionError> {
    name(field, text, 64)
}

pub(crate) fn is_name(text: &str, bytes_max: usize) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.len() <= bytes_max
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(inner)
}

fn is_unicast_mac(text: &str) -> bool {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|pair| {
            let hex = pair.len() == 2 && pair.bytes().all(|byte| byte.is_ascii_hexdigit());
            hex.then(|| u8::from_str_radix(pair, 16).ok()).flatten()
        })
        .collect();
    bytes.is_some_and(|bytes| {
        bytes.len() == 6 && bytes[0] & 1 == 0 && bytes.iter().any(|byte| *byte != 0)
    })
}

fn within(field: &str, value: u64, min: u64, max: u64) -> Result<(), DescriptionError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    refuse(field, format!("is {value}: it must be {min} to {max}"))
}

fn count(field: &str, count: usize, max: usize) -> Result<(), DescriptionError> {
    if count <= max {
        return Ok(());
    }
    refuse(field, format!("has {count} entries: {max} is the most"))
}

fn unique(field: &str, seen: &mut BTreeSet<String>, value: &str) -> Result<(), DescriptionError> {
    if seen.insert(value.to_owned()) {
        return Ok(());
    }
    refuse(field, format!("`{value}` is there twice"))
}

fn refuse(field: &str, problem: String) -> Result<(), DescriptionError> {
    Err(DescriptionError {
        field: field.to_owned(),
        problem,
    })
}

/// Returns the beginning of a text of unknown origin, safe for display.
fn shown(text: &str) -> String {
    let start: String = text.chars().take(40).collect();
    start.escape_debug().to_string()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a valid description with one device of each kind.
    pub(crate) fn sample() -> GuestDescription {
        let text = r#"
            name = "web-7"
            machine = "pc-q35-7.2"
            cpu = "qemu64,+avx,-svm"
            vcpus = 2
            memory_mib = 128
            firmware = "ovmf"
            kernel = { name = "tiny", command_line = "console=hvc0 -- a,b=c" }
            disks = [{ name = "vda", image = "debian", shared = true }]
            nics = [{ network = "office", mac = "52:54:00:12:34:56" }]
            channels = [{ name = "org.qemu.guest_agent.0" }]
        "#;
        parse(text).unwrap()
    }

    fn refused(change: impl FnOnce(&mut GuestDescription)) -> String {
        let mut description = sample();
        change(&mut description);
        check(&description).unwrap_err().to_string()
    }

    #[test]
    fn hostile_names_are_refused() {
        for hostile in [
            "",
            "..",
            "../../etc/passwd",
            "a/b",
            "a,id=x",
            "a b",
            "a\n",
            "a\0",
            "-daemonize",
            ".hidden",
            "ä",
            "$(id)",
            &"a".repeat(300),
        ] {
            let changes: [fn(&mut GuestDescription, String); 8] = [
                |d, text| d.name = text,
                |d, text| d.machine = text,
                |d, text| d.cpu = text,
                |d, text| d.firmware = Some(text),
                |d, text| d.disks[0].name = text,
                |d, text| d.disks[0].image = text,
                |d, text| d.nics[0].network = text,
                |d, text| d.channels[0].name = text,
            ];
            for change in changes {
                let error = refused(|description| change(description, hostile.to_owned()));
                assert!(error.starts_with("guest description: `"), "{error}");
                assert!(!error.contains(char::is_control), "{error:?}");
                assert!(error.len() < 300, "{error}");
            }
        }
    }

    #[test]
    fn sizes_and_counts_have_limits() {
        assert!(refused(|d| d.vcpus = 0).contains("must be 1 to 255"));
        assert!(refused(|d| d.vcpus = 256).contains("is 256"));
        assert!(refused(|d| d.memory_mib = 15).contains("must be 16 to 16777216"));
        assert!(refused(|d| d.memory_mib = u64::MAX).contains("`memory_mib` is"));
        assert!(refused(|d| d.disks = vec![d.disks[0].clone(); 13]).contains("12 is the most"));
        assert!(refused(|d| d.nics = vec![d.nics[0].clone(); 9]).contains("8 is the most"));
        assert!(refused(|d| d.channels = vec![d.channels[0].clone(); 17]).contains("16 is"));
    }

    #[test]
    fn what_must_differ_differs() {
        assert!(refused(|d| d.disks.push(d.disks[0].clone())).contains("`vda` is there twice"));
        let error = refused(|d| {
            d.disks.push(d.disks[0].clone());
            d.disks[1].name = "vdb".to_owned();
        });
        assert!(
            error.contains("`disks.image` `debian` is there twice"),
            "{error}"
        );
        assert!(refused(|d| d.nics.push(d.nics[0].clone())).contains("twice"));
        assert!(refused(|d| d.channels.push(d.channels[0].clone())).contains("twice"));
    }

    #[test]
    fn machines_cpus_and_addresses_have_their_form() {
        for machine in [
            "q35",
            "pc",
            "pc-q35-",
            "pc-q35-.",
            "pc-q35-a b",
            "pc-q35-10.0,x=y",
            "isapc",
            "virt-7.2",
        ] {
            let error = refused(|d| d.machine = machine.to_owned());
            assert!(error.contains("versioned type"), "{error}");
        }
        for cpu in [
            "qemu64,avx",
            "qemu64,+",
            "qemu64,+a=b",
            "+avx",
            "a,",
            "qemu64,migratable=no",
            "qemu64,vendor=on,x",
            "qemu64,vendor=AMD",
            "qemu64,level=1:",
        ] {
            let error = refused(|d| d.cpu = cpu.to_owned());
            assert!(error.contains("write a model"), "{error}");
        }
        for mac in [
            "",
            "52:54:00:12:34",
            "53:54:00:12:34:56",
            "5254.0012.3456",
            "52:54:00:12:34:+6",
        ] {
            let error = refused(|d| d.nics[0].mac = mac.to_owned());
            assert!(error.contains("`nics.mac`"), "{error}");
        }
        let error = refused(|d| d.kernel.as_mut().unwrap().command_line = "a\nb".to_owned());
        assert!(error.contains("not printable"), "{error}");
        let error = refused(|d| d.kernel.as_mut().unwrap().command_line = "a".repeat(2048));
        assert!(error.contains("longer than 2047"), "{error}");
    }

    #[test]
    fn machines_of_distributions_are_versioned() {
        for (machine, chipset) in [
            ("pc-q35-10.0", Chipset::Q35),
            ("pc-q35-rhel9.6.0", Chipset::Q35),
            ("pc-q35-noble-hpb", Chipset::Q35),
            ("pc-i440fx-jammy", Chipset::I440fx),
        ] {
            assert_eq!(Chipset::of(machine), Some(chipset));
            let mut description = sample();
            description.machine = machine.to_owned();
            check(&description).unwrap();
        }
    }

    #[test]
    fn unknown_fields_are_refused_with_their_line() {
        let error = parse("name = 'a'\nargs = '-hda /etc/shadow'")
            .unwrap_err()
            .to_string();
        assert!(error.contains("line 2"), "{error}");
        assert!(error.contains("args"), "{error}");
    }
}
