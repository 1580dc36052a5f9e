//! Makes what a line needs: images, variables, interfaces, files, and the agents' configurations
//! that a careful operator would write for them.

use crate::exec::Descriptor;
use crate::line::{DiskKind, Helper, Line, fill};
use crate::stage::{BRIDGE, DESTINATION, SOURCE, Stage, make_folder};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::installed;
use longhaul_lab::process;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Firmware of Debian's package `ovmf`.
const OVMF: &str = "/usr/share/ovmf/OVMF.fd";
const OVMF_CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const OVMF_SECURE: &str = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd";
const OVMF_VARS: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";
/// Firmware of QEMU's own packages.
const SEABIOS: &str = "/usr/share/seabios/bios-256k.bin";

/// What a placeholder of an image below that of a disk has after the disk's: `{DISK1_BELOW0}` is
/// the lowest one.
const BELOW: &str = "_BELOW";

const MIB: u64 = 1 << 20;
const FLOPPY_BYTES: u64 = 1_474_560;
/// A boot sector that halts the processor without interrupts: the guest runs, and its state does
/// not change. In assembly: cli; hlt; jmp back to hlt.
const BOOT_SECTOR: [u8; 4] = [0xfa, 0xf4, 0xeb, 0xfd];
/// The end of a boot sector.
const BOOTABLE: [u8; 2] = [0x55, 0xaa];

/// An image of a line.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    /// Its name in the configurations.
    pub(crate) name: String,
    /// Its path on each host.
    pub(crate) paths: [PathBuf; 2],
    /// `raw` or `qcow2`.
    pub(crate) format: &'static str,
    /// Whether it moves with the guest.
    pub(crate) local: bool,
    /// Whether the firmware of a running guest may write to it.
    pub(crate) of_firmware: bool,
}

/// What a line needs.
#[derive(Debug, Default)]
pub(crate) struct Material {
    pub(crate) values: BTreeMap<String, String>,
    pub(crate) images: Vec<Image>,
    pub(crate) open: BTreeMap<String, Descriptor>,
    volumes: Vec<Volume>,
    helper: Option<Child>,
}

/// A loop device. It is removed when this is dropped.
#[derive(Debug)]
struct Volume(String);

impl Drop for Volume {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = process::run(Command::new("losetup").args(["--detach", &self.0]));
    }
}

impl Drop for Material {
    fn drop(&mut self) {
        if let Some(helper) = &mut self.helper {
            // It may have ended with its QEMU.
            let _ = helper.kill();
            let _ = helper.wait();
        }
    }
}

impl Material {
    /// Makes everything for a line.
    ///
    /// # Errors
    /// When some of it cannot be made.
    pub(crate) fn make(stage: &Stage, line: &Line) -> Result<Self, LabError> {
        let mut made = Self::default();
        let run = stage.run_folder()?;
        made.fixed(stage, &run)?;
        let wanted = line.placeholders();
        // A line may name a disk by a relative path instead of its placeholder.
        let disks: BTreeSet<&String> = wanted.iter().chain(line.disks.keys()).collect();
        // The images below an overlay come with it.
        let is_disk = |key: &&&String| key.starts_with("DISK") && !key.contains(BELOW);
        for key in disks.iter().filter(is_disk) {
            let kind = line.disks.get(*key).copied().unwrap_or(DiskKind::Raw);
            made.disk(stage, key, kind)?;
        }
        for key in &wanted {
            made.other(stage, line, key, &run)?;
        }
        for (key, text) in &line.files {
            let path = run.join(key.to_lowercase());
            made.put(&path, fill(text, &made.values).as_bytes(), 0o644)?;
            made.value(key, &path);
        }
        made.inputs(line, &run)?;
        made.interfaces(stage, line)?;
        if line.helper == Some(Helper::Swtpm) {
            made.tpm(stage, line, &run)?;
        }
        Ok(made)
    }

    fn value(&mut self, key: &str, path: &Path) {
        self.values
            .insert(key.to_owned(), path.display().to_string());
    }

    fn put(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<(), LabError> {
        fs::write(path, bytes)
            .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
            .during(|| format!("write {}", path.display()))
    }

    /// Makes what every line may name.
    fn fixed(&mut self, stage: &Stage, run: &Path) -> Result<(), LabError> {
        let share = self.share(stage, SOURCE)?;
        make_folder(&share)?;
        make_folder(&self.share(stage, DESTINATION)?)?;
        let (up, down) = (run.join("ifup"), run.join("ifdown"));
        let script = format!("#!/bin/sh\nip link set \"$1\" master {BRIDGE} up\n");
        self.put(&up, script.as_bytes(), 0o755)?;
        self.put(&down, b"#!/bin/sh\nexit 0\n", 0o755)?;
        for (key, path) in [
            ("RUN", run),
            ("SHARE", &share),
            ("IFUP", &up),
            ("IFDOWN", &down),
            ("QMP", &run.join("added.qmp")),
            ("OVMF", Path::new(OVMF)),
            ("OVMF_CODE", Path::new(OVMF_CODE)),
            ("OVMF_SECURE", Path::new(OVMF_SECURE)),
            ("SEABIOS", Path::new(SEABIOS)),
            ("KERNEL", &stage.files.kernel),
            ("INITRD", &stage.files.initramfs),
            ("BRIDGE", Path::new(BRIDGE)),
        ] {
            self.value(key, path);
        }
        Ok(())
    }

    fn disk(&mut self, stage: &Stage, key: &str, kind: DiskKind) -> Result<(), LabError> {
        let name = key.to_lowercase();
        let format = match kind {
            DiskKind::Qcow2 | DiskKind::Qcow2WithBitmap => "qcow2",
            DiskKind::Clone | DiskKind::Chain | DiskKind::RelativeChain => "qcow2",
            DiskKind::Vmdk => "vmdk",
            _ => "raw",
        };
        let file = format!("{name}.{format}");
        let paths = [
            stage.images(SOURCE)?.join(&file),
            stage.images(DESTINATION)?.join(&file),
        ];
        make_disk(&paths[SOURCE], kind, format)?;
        self.overlays(stage, key, kind, &paths)?;
        self.value(key, &paths[SOURCE]);
        let mut image = Image {
            name,
            paths,
            format,
            local: true,
            of_firmware: false,
        };
        match kind {
            DiskKind::Volume => {
                let file = image.paths[SOURCE].display().to_string();
                let words = ["--find", "--show", &file];
                let device = process::run(Command::new("losetup").args(words))?;
                let device = device.trim().to_owned();
                // A name of its own, as logical volumes have.
                let link = stage.images(SOURCE)?.join(format!("{}.volume", image.name));
                let linked = symlink(&device, &link);
                self.volumes.push(Volume(device));
                linked.during(|| format!("make {}", link.display()))?;
                self.value(key, &link);
                image.paths[SOURCE] = link;
                self.images.push(image);
            }
            // No configuration can name it.
            DiskKind::Vmdk => {}
            _ => self.images.push(image),
        }
        Ok(())
    }

    /// Makes an image the last one of a chain. What it has becomes the content of the first one,
    /// and each image has something of its own.
    fn overlays(
        &mut self,
        stage: &Stage,
        key: &str,
        kind: DiskKind,
        paths: &[PathBuf; 2],
    ) -> Result<(), LabError> {
        let name = key.to_lowercase();
        let (formats, relative): (&[&'static str], bool) = match kind {
            DiskKind::Clone => (&["raw"], false),
            DiskKind::Chain => (&["qcow2", "qcow2"], false),
            DiskKind::RelativeChain => (&["raw", "qcow2"], true),
            _ => return Ok(()),
        };
        let mut below: Option<(PathBuf, &str)> = None;
        for (number, format) in formats.iter().copied().enumerate() {
            let called = format!("{name}-below{number}");
            let file = format!("{called}.{format}");
            let own = [
                stage.images(SOURCE)?.join(&file),
                stage.images(DESTINATION)?.join(&file),
            ];
            match &below {
                None => convert_from("qcow2", &paths[SOURCE], format, &own[SOURCE])?,
                Some(below) => overlay(below, &own[SOURCE], relative, number as u64)?,
            }
            self.value(&format!("{key}{BELOW}{number}"), &own[SOURCE]);
            below = Some((own[SOURCE].clone(), format));
            self.images.push(Image {
                name: called,
                paths: own,
                format,
                local: true,
                of_firmware: false,
            });
        }
        let Some(below) = below else { return Ok(()) };
        fs::remove_file(&paths[SOURCE]).during(|| format!("remove {name}"))?;
        overlay(&below, &paths[SOURCE], relative, formats.len() as u64)
    }

    fn other(&mut self, stage: &Stage, line: &Line, key: &str, run: &Path) -> Result<(), LabError> {
        let number = |prefix: &str| -> Option<u32> { key.strip_prefix(prefix)?.parse().ok() };
        if number("ISO").is_some() || key == "FLOPPY" {
            self.medium(stage, line, key, run)?;
        } else if key == "OVMF_VARS" {
            self.variables(stage, line)?;
        } else if let Some(number) = number("TAPFD") {
            let interface = format!("mf{number}");
            let bridge = BRIDGE.to_owned();
            self.open
                .insert(key.to_owned(), Descriptor::Tap { interface, bridge });
        } else if let Some(number) = number("TAP") {
            self.values.insert(key.to_owned(), format!("mt{number}"));
        } else if number("SOCKFD").is_some() || key == "QMPFD" {
            let path = run.join(key.to_lowercase());
            self.open.insert(key.to_owned(), Descriptor::Listener(path));
        } else if key == "LOGFD" {
            let path = run.join("console.log");
            self.open.insert(key.to_owned(), Descriptor::Log(path));
        }
        Ok(())
    }

    /// Makes a CD or a floppy: the same file on both hosts, or one that moves.
    fn medium(
        &mut self,
        stage: &Stage,
        line: &Line,
        key: &str,
        run: &Path,
    ) -> Result<(), LabError> {
        let name = key.to_lowercase();
        let file = format!("{name}.img");
        let local = line.disks.get(key) == Some(&DiskKind::Seed);
        let paths = match local {
            true => [
                stage.images(SOURCE)?.join(&file),
                stage.images(DESTINATION)?.join(&file),
            ],
            false => [run.join(&file), run.join(&file)],
        };
        let bytes = match key {
            "FLOPPY" => FLOPPY_BYTES,
            _ => MIB,
        };
        let content: Vec<u8> = noise(bytes as usize);
        self.put(&paths[SOURCE], &content, 0o666)?;
        self.value(key, &paths[SOURCE]);
        self.images.push(Image {
            name,
            paths,
            format: "raw",
            local,
            of_firmware: false,
        });
        Ok(())
    }

    fn variables(&mut self, stage: &Stage, line: &Line) -> Result<(), LabError> {
        let format = match line.disks.get("OVMF_VARS") {
            Some(DiskKind::Qcow2Variables) => "qcow2",
            _ => "raw",
        };
        let file = format!("vars.{format}");
        let paths = [
            stage.images(SOURCE)?.join(&file),
            stage.images(DESTINATION)?.join(&file),
        ];
        convert(Path::new(OVMF_VARS), format, &paths[SOURCE])?;
        self.value("OVMF_VARS", &paths[SOURCE]);
        self.images.push(Image {
            name: "vars".to_owned(),
            paths,
            format,
            local: true,
            of_firmware: true,
        });
        Ok(())
    }

    /// Makes the folders of paths below `{RUN}`, and the files there that QEMU reads: keys and
    /// pictures.
    fn inputs(&self, line: &Line, run: &Path) -> Result<(), LabError> {
        let prefix = format!("{}/", run.display());
        let texts = line.argv.iter().chain(line.files.values());
        for text in texts.map(|text| fill(text, &self.values)) {
            for part in text.split(&prefix).skip(1) {
                let end = part.find([',', '"', ' ', '\n']).unwrap_or(part.len());
                let path = run.join(&part[..end]);
                let mut folder = path.parent();
                while let Some(below) = folder.filter(|folder| *folder != run) {
                    make_folder(below)?;
                    folder = below.parent();
                }
                match path.extension().and_then(|ending| ending.to_str()) {
                    Some("aes") => self.put(&path, &noise(32), 0o644)?,
                    Some("jpg") => {
                        self.put(&path, b"\xff\xd8\xff\xe0\0\x10JFIF\0\xff\xd9", 0o644)?
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Returns the folder that a guest shares with a host.
    fn share(&self, stage: &Stage, host: usize) -> Result<PathBuf, LabError> {
        let folder = match host {
            SOURCE => stage.run_folder()?,
            _ => stage.images(host)?,
        };
        Ok(folder.join("share"))
    }

    /// Makes the TAPs that a line expects, unless a script of it makes them.
    fn interfaces(&self, stage: &Stage, line: &Line) -> Result<(), LabError> {
        let host = stage.host(SOURCE)?.namespace();
        for (key, interface) in &self.values {
            let placeholder = format!("{{{key}}}");
            let texts = || line.argv.iter().chain(line.files.values());
            let mut users = texts().filter(|text| text.contains(&placeholder));
            let is_tap = key
                .strip_prefix("TAP")
                .is_some_and(|rest| rest.parse::<u32>().is_ok());
            if !is_tap || users.clone().any(|text| text.contains("{IFUP}")) {
                continue;
            }
            let queues = match users.any(|text| text.contains("queues=")) {
                true => " multi_queue",
                false => "",
            };
            host.configure(&format!(
                "tuntap add {interface} mode tap{queues}\n\
                 link set {interface} master {BRIDGE} up\n"
            ))?;
        }
        Ok(())
    }

    /// Starts an emulated TPM at the socket that the line names.
    fn tpm(&mut self, stage: &Stage, line: &Line, run: &Path) -> Result<(), LabError> {
        let no_socket = || LabError::Which(format!("{} names no socket of a TPM", line.id));
        let filled = line.argv.iter().map(|word| fill(word, &self.values));
        let socket = filled
            .flat_map(|word| {
                word.split([',', '='])
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .find(|part| part.ends_with(".swtpm"))
            .ok_or_else(no_socket)?;
        let folder = run.join("tpm");
        make_folder(&folder)?;
        let mut command = Command::new("swtpm");
        command
            .args(["socket", "--tpm2", "--tpmstate"])
            .arg(format!("dir={}", folder.display()))
            .arg("--ctrl")
            .arg(format!("type=unixio,path={socket}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.helper = Some(stage.host(SOURCE)?.spawn(&mut command)?);
        let there = process::wait_until(crate::LIMIT, || Path::new(&socket).exists());
        match there {
            true => Ok(()),
            false => Err(LabError::Which(format!(
                "{}: its TPM does not start",
                line.id
            ))),
        }
    }

    /// Returns the tables of the configuration of a host for this line.
    pub(crate) fn configuration(
        &self,
        stage: &Stage,
        line: &Line,
        host: usize,
    ) -> Result<toml::Table, LabError> {
        let text = |path: &Path| toml::Value::from(path.display().to_string());
        let emulator = installed::qemu(&line.qemu)?;
        let emulators = toml::Table::from_iter([(line.qemu.clone(), text(&emulator))]);
        let qemu = toml::Table::from_iter([
            ("accelerator".to_owned(), "tcg".into()),
            ("default".to_owned(), line.qemu.as_str().into()),
            ("run_as".to_owned(), "root".into()),
            ("emulators".to_owned(), emulators.into()),
        ]);
        let mut images = toml::Table::new();
        for image in &self.images {
            let mut table = toml::Table::from_iter([
                ("path".to_owned(), text(&image.paths[host])),
                ("format".to_owned(), image.format.into()),
            ]);
            if image.local {
                table.insert("local".to_owned(), true.into());
            }
            images.insert(image.name.clone(), table.into());
        }
        let bridge = toml::Table::from_iter([("bridge".to_owned(), BRIDGE.into())]);
        let networks = toml::Table::from_iter([
            ("office".to_owned(), toml::Value::from(bridge)),
            ("unplugged".to_owned(), "none".into()),
            ("cut-off".to_owned(), "user".into()),
            ("world".to_owned(), "nat".into()),
        ]);
        let folder = text(&self.share(stage, host)?);
        let folders = toml::Table::from_iter([("share".to_owned(), folder)]);
        let mut firmware = toml::Table::new();
        let known = [("ovmf", OVMF), ("code", OVMF_CODE), ("secure", OVMF_SECURE)];
        for (name, path) in known.into_iter().chain([("seabios", SEABIOS)]) {
            if Path::new(path).exists() {
                firmware.insert(name.to_owned(), path.into());
            }
        }
        let mut kernel = toml::Table::new();
        let has = |word: &str| line.argv.iter().any(|other| other == word);
        for (key, option, placeholder) in [
            ("kernel", "-kernel", "KERNEL"),
            ("initrd", "-initrd", "INITRD"),
        ] {
            if let (true, Some(path)) = (has(option), self.values.get(placeholder)) {
                kernel.insert(key.to_owned(), path.as_str().into());
            }
        }
        let mut tables = toml::Table::from_iter([
            ("qemu".to_owned(), qemu.into()),
            ("images".to_owned(), images.into()),
            ("networks".to_owned(), networks.into()),
            ("firmware".to_owned(), firmware.into()),
            ("folders".to_owned(), folders.into()),
        ]);
        if !kernel.is_empty() {
            let kernels = toml::Table::from_iter([("k".to_owned(), toml::Value::from(kernel))]);
            tables.insert("kernels".to_owned(), kernels.into());
        }
        Ok(tables)
    }
}

/// Returns bytes that do not compress, always the same.
fn noise(count: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(count + 8);
    while bytes.len() < count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(count);
    bytes
}

/// Makes a disk with a boot sector, noise, text, and holes between them.
fn make_disk(path: &Path, kind: DiskKind, format: &str) -> Result<(), LabError> {
    let size = match kind {
        DiskKind::SmallRaw => 16 * MIB,
        _ => 64 * MIB,
    };
    let raw = path.with_extension("new");
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&raw)?;
        file.set_len(size)?;
        let mut sector = vec![0; 512];
        sector[..4].copy_from_slice(&BOOT_SECTOR);
        sector[510..].copy_from_slice(&BOOTABLE);
        file.write_all(&sector)?;
        file.seek(SeekFrom::Start(MIB))?;
        file.write_all(&noise(3 << 20))?;
        file.seek(SeekFrom::Start(9 * MIB))?;
        file.write_all(&b"the same line again and again\n".repeat(30_000))?;
        Ok(())
    };
    write().during(|| format!("write {}", raw.display()))?;
    match format {
        "raw" => fs::rename(&raw, path).during(|| format!("make {}", path.display()))?,
        _ => {
            convert(&raw, format, path)?;
            fs::remove_file(&raw).during(|| format!("remove {}", raw.display()))?;
        }
    }
    if kind == DiskKind::Qcow2WithBitmap {
        let mut command = Command::new("qemu-img");
        command.args(["bitmap", "--add"]).arg(path).arg("b0");
        process::run(&mut command)?;
    }
    fs::set_permissions(path, Permissions::from_mode(0o666))
        .during(|| format!("open {} to others", path.display()))
}

/// Makes an overlay of an image, and writes something to it.
fn overlay(
    (below, format): &(PathBuf, &str),
    to: &Path,
    relative: bool,
    number: u64,
) -> Result<(), LabError> {
    let named = match (relative, below.file_name()) {
        (true, Some(name)) => Path::new(name),
        _ => below,
    };
    let mut command = Command::new("qemu-img");
    command
        .args(["create", "-q", "-f", "qcow2", "-F", format, "-b"])
        .arg(named)
        .arg(to);
    process::run(&mut command)?;
    let write = format!("write -P {} {}M 1M", 0x40 + number, 20 + 2 * number);
    let mut command = Command::new("qemu-io");
    command.args(["-f", "qcow2", "-c", &write]).arg(to);
    process::run(&mut command)?;
    fs::set_permissions(to, Permissions::from_mode(0o666))
        .during(|| format!("open {} to others", to.display()))
}

fn convert(from: &Path, format: &str, to: &Path) -> Result<(), LabError> {
    convert_from("raw", from, format, to)
}

fn convert_from(own: &str, from: &Path, format: &str, to: &Path) -> Result<(), LabError> {
    let mut command = Command::new("qemu-img");
    command
        .args(["convert", "-f", own, "-O", format])
        .arg(from)
        .arg(to);
    process::run(&mut command)?;
    fs::set_permissions(to, Permissions::from_mode(0o666))
        .during(|| format!("open {} to others", to.display()))
}

#[cfg(test)]
mod tests {
    use super::noise;

    #[test]
    fn noise_is_as_long_as_asked_and_always_the_same() {
        assert_eq!(noise(13).len(), 13);
        assert_eq!(noise(13), noise(64)[..13]);
        assert_ne!(noise(16)[..8], noise(16)[8..]);
    }
}
