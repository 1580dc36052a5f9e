//! Runs libvirt's daemon on emulated hosts, and guests of the laboratory as its domains.
//!
//! The daemon knows its folders by fixed paths, so each one has a mount namespace, in which these
//! are folders of its host. Its sockets can be used from outside by their paths there. A release
//! that is not installed also has its own `/usr` and `/etc` there.

use crate::error::{During, LabError};
use crate::guest::KernelFiles;
use crate::guest::disks::LocalDisk;
use crate::installed;
use crate::lab::Host;
use crate::process::{self, run, wait_until};
use longhaul_protocol::guest::{GuestDescription, Nic};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The folders of the daemon, and the host's folders that it has in their place.
const FOLDERS: [(&str, &str); 7] = [
    ("/run/libvirt", "run"),
    ("/var/lib/libvirt", "lib"),
    ("/var/log/libvirt", "log"),
    ("/var/cache/libvirt", "cache"),
    ("/var/log/swtpm", "tpm-log"),
    ("/var/lib/swtpm-localca", CERTIFICATES),
    ("/etc/libvirt", "etc"),
];
/// The time limit for a daemon's start. The first one asks each QEMU what it can do.
const START_LIMIT: Duration = Duration::from_secs(120);
/// The accounts of Debian's packages for QEMUs and for emulated TPMs.
const ACCOUNT: &str = "libvirt-qemu";
const TPM_ACCOUNT: &str = "tss";
/// A device with the number of KVM's that everybody may open, as on a host with udev's rules.
/// libvirt asks a QEMU again what it can do for as long as its account cannot open it.
const KVM: &str = "kvm";

/// The folder of the certificates of emulated TPMs, which belongs to their account.
const CERTIFICATES: &str = "tpm-certificates";

/// A release of libvirt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// The one that is installed.
    Installed,
    /// The newest one, in a root of its own.
    Newest,
    /// That of Debian 12 with a daemon for QEMU alone, in a root of its own.
    Modular,
}

impl Release {
    /// Returns the root in which it is unpacked.
    fn root(self) -> Option<PathBuf> {
        match self {
            Self::Installed => None,
            Self::Newest => Some(installed::folder().join("libvirt/12/root")),
            Self::Modular => Some(installed::folder().join("libvirt/modular/root")),
        }
    }

    /// Returns the name of the daemon.
    fn daemon(self) -> &'static str {
        match self {
            Self::Installed | Self::Newest => "libvirtd",
            Self::Modular => "virtqemud",
        }
    }

    fn program(self) -> String {
        format!("/usr/sbin/{}", self.daemon())
    }

    /// Returns the name of the socket of its RPC protocol.
    fn socket(self) -> &'static str {
        match self {
            Self::Installed | Self::Newest => "libvirt-sock",
            Self::Modular => "virtqemud-sock",
        }
    }

    /// Returns the version of QEMU that goes with it in tests.
    pub fn qemu(self) -> &'static str {
        match self {
            // A version that libvirt 9.0 knows.
            Self::Installed | Self::Modular => "7.2",
            Self::Newest => "11.1",
        }
    }

    /// Returns its version, such as `9.0.0`.
    ///
    /// # Errors
    /// When it is not there.
    pub fn version(self) -> Result<String, LabError> {
        let root = self.root().unwrap_or_else(|| PathBuf::from("/"));
        let program = self.program();
        let there = [&*program, "/usr/bin/swtpm_setup"].map(|path| root.join(&path[1..]));
        let there = there.into_iter().chain(["/usr/bin/virsh".into()]);
        if let Some(missing) = there.into_iter().find(|path| !path.is_file()) {
            return Err(LabError::Missing {
                what: format!("libvirt ({})", missing.display()),
                hint: "sudo scripts/install lab".to_owned(),
            });
        }
        let said = run(Command::new("chroot")
            .arg(root)
            .args([&*program, "--version"]))?;
        let version = said.split_whitespace().next_back().unwrap_or_default();
        Ok(version.to_owned())
    }
}

/// An account of this machine. A release in a root of its own knows others, so it gets numbers.
struct Account {
    user: u32,
    group: u32,
}

impl Account {
    fn of(name: &str) -> Result<Self, LabError> {
        let number = |which: &str| {
            let said = run(Command::new("id").args([which, name]))?;
            said.trim().parse().map_err(|_| LabError::Answer {
                what: format!("the account {name}"),
                message: said,
            })
        };
        Ok(Self {
            user: number("-u")?,
            group: number("-g")?,
        })
    }
}

/// The daemon of an emulated host. It is ended when this is dropped; its guests are not.
#[derive(Debug)]
pub struct Libvirt {
    release: Release,
    folder: PathBuf,
    process: Child,
}

impl Libvirt {
    /// Starts the daemon of a host.
    ///
    /// # Errors
    /// When it is not installed, or does not come up.
    pub fn start(host: &Host, release: Release) -> Result<Self, LabError> {
        release.version()?;
        let folder = host.folder().join("libvirt");
        for (_, own) in FOLDERS {
            let own = folder.join(own);
            fs::create_dir_all(&own).during(|| format!("make {}", own.display()))?;
        }
        let uuid = fs::read_to_string("/proc/sys/kernel/random/uuid");
        let uuid = uuid.during(|| "make a UUID".to_owned())?;
        let daemon = format!(
            "auth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\nhost_uuid = \"{}\"\n",
            uuid.trim()
        );
        let (qemu, tpm) = (Account::of(ACCOUNT)?, Account::of(TPM_ACCOUNT)?);
        let certificates = folder.join(CERTIFICATES);
        let owned = chown(&certificates, Some(tpm.user), Some(tpm.group));
        owned.during(|| format!("give away {}", certificates.display()))?;
        // As Debian has it, but for what two daemons of one machine cannot share: control groups
        // would have the same names.
        let qemu = format!(
            "user = \"+{}\"\ngroup = \"+{}\"\nswtpm_user = \"+{}\"\nswtpm_group = \"+{}\"\n\
             cgroup_controllers = [ ]\nstdio_handler = \"file\"\n",
            qemu.user, qemu.group, tpm.user, tpm.group
        );
        let daemon = (format!("{}.conf", release.daemon()), &daemon);
        for (name, content) in [daemon, ("qemu.conf".to_owned(), &qemu)] {
            let path = folder.join("etc").join(name);
            fs::write(&path, content).during(|| format!("write {}", path.display()))?;
        }
        let process = Self::spawn(host, release, &folder)?;
        let mut libvirt = Self {
            release,
            folder,
            process,
        };
        libvirt.wait_until_it_answers()?;
        Ok(libvirt)
    }

    fn spawn(host: &Host, release: Release, folder: &Path) -> Result<Child, LabError> {
        let log = folder.join("libvirtd.log");
        let log = File::options().create(true).append(true).open(&log);
        let log = log.during(|| format!("open the log in {}", folder.display()))?;
        let mut script = String::from("set -e\n");
        let bind = |own: &Path, path: &str| format!("mount --bind '{}' {path}\n", own.display());
        let root = release.root();
        if let Some(root) = &root {
            script += &bind(&root.join("etc"), "/etc");
        }
        for (path, own) in FOLDERS {
            fs::create_dir_all(path).during(|| format!("make {path}"))?;
            script += &bind(&folder.join(own), path);
        }
        if Path::new("/dev/kvm").exists() {
            let kvm = folder.join(KVM);
            script += &format!(
                "[ -e '{0}' ] || mknod -m 666 '{0}' c 10 232\n",
                kvm.display()
            );
            script += &bind(&kvm, "/dev/kvm");
        }
        // The last one: what it has may not run with this host's `/etc`, nor the other way round.
        if let Some(root) = &root {
            script += &bind(&root.join("usr"), "/usr");
        }
        script += &format!(
            "exec {} --pid-file /run/libvirt/daemon.pid\n",
            release.program()
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
        let errors = log.try_clone().during(|| "open the log".to_owned())?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        command.process_group(0);
        host.spawn(&mut command)
    }

    fn wait_until_it_answers(&mut self) -> Result<(), LabError> {
        let socket = self.socket();
        let mut ended = None;
        let answers = wait_until(START_LIMIT, || {
            ended = self.process.try_wait().ok().flatten();
            ended.is_some() || UnixStream::connect(&socket).is_ok()
        });
        match (ended, answers) {
            (None, true) => Ok(()),
            (Some(status), _) => Err(LabError::Command {
                command: self.release.program(),
                message: format!("{status}: {}", self.end_of_log()),
            }),
            (None, false) => Err(LabError::Late {
                what: "libvirt did not answer".to_owned(),
                seconds: START_LIMIT.as_secs(),
                log: self.folder.join("libvirtd.log"),
            }),
        }
    }

    /// Returns the socket of its RPC protocol.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("run").join(self.release.socket())
    }

    /// Returns the folder in which it keeps what its domains have: `/var/lib/libvirt`.
    pub fn folder_of_state(&self) -> PathBuf {
        self.folder.join("lib")
    }

    /// Returns the number of its process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the last lines of its log.
    pub fn end_of_log(&self) -> String {
        let log = fs::read_to_string(self.folder.join("libvirtd.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(5)..].join(" | ")
    }

    /// Ends it without warning, as a crash would. Its guests go on.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn kill(&mut self) -> Result<(), LabError> {
        // It may be dead already.
        let _ = self.process.kill();
        let ended = self.process.wait();
        ended.map(drop).during(|| "wait for libvirt".to_owned())
    }

    /// Starts it again after it was killed.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn restart(&mut self, host: &Host) -> Result<(), LabError> {
        self.kill()?;
        self.process = Self::spawn(host, self.release, &self.folder)?;
        self.wait_until_it_answers()
    }

    /// Adds to its configuration for QEMU, which it reads when it is started again.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn configure_qemu(&self, lines: &str) -> Result<(), LabError> {
        let path = self.folder.join("etc/qemu.conf");
        let file = File::options().append(true).open(&path);
        let written = file.and_then(|mut file| file.write_all(lines.as_bytes()));
        written.during(|| format!("write {}", path.display()))
    }

    /// Hides a program from the daemon, or shows it again, as if it were not installed.
    ///
    /// # Errors
    /// When it cannot be done.
    pub fn hide(&self, program: &Path, hidden: bool) -> Result<(), LabError> {
        let pid = self.process.id().to_string();
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &pid]);
        match hidden {
            true => command.args(["mount", "--bind", "/dev/null"]),
            false => command.arg("umount"),
        };
        run(command.arg(program)).map(drop)
    }

    /// Returns a command of libvirt's own client.
    pub fn virsh(&self, words: &[&str]) -> Command {
        virsh_at(&self.socket(), words)
    }

    /// Runs a command of libvirt's own client, and returns its output.
    ///
    /// # Errors
    /// When it fails.
    pub fn run(&self, words: &[&str]) -> Result<String, LabError> {
        Ok(run(&mut self.virsh(words))?.trim().to_owned())
    }

    /// Defines a domain, and starts it.
    ///
    /// # Errors
    /// When libvirt refuses.
    pub fn start_domain(&self, name: &str, xml: &str) -> Result<(), LabError> {
        let path = self.folder.join(format!("{name}.xml"));
        fs::write(&path, xml).during(|| format!("write {}", path.display()))?;
        self.run(&["define", &path.display().to_string()])?;
        self.run(&["start", name]).map(drop)
    }

    /// Returns the host's end of a channel of a domain that runs.
    pub fn channel(&self, domain: &str, channel: &str) -> Option<PathBuf> {
        // Newer releases have another folder.
        let folders = ["run/qemu/channel", "lib/qemu/channel/target"];
        let folders = folders.map(|folder| fs::read_dir(self.folder.join(folder)));
        let folders = folders.into_iter().filter_map(Result::ok).flatten();
        let end = format!("-{domain}");
        let mut sockets = folders
            .filter_map(Result::ok)
            .filter(|folder| folder.file_name().to_string_lossy().ends_with(&end))
            .map(|folder| folder.path().join(channel));
        sockets.find(|socket| UnixStream::connect(socket).is_ok())
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        let pid = i32::try_from(self.process.id()).unwrap_or_default();
        if let Err(error) = process::kill_all(&[pid]) {
            crate::lab::say(&error.to_string());
        }
        let _ = self.process.wait();
    }
}

/// Returns a command of libvirt's own client, for the daemon at a socket.
pub fn virsh_at(socket: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("virsh");
    let uri = format!("qemu+unix:///system?socket={}", socket.display());
    command.args(["--quiet", "--connect", &uri]).args(words);
    command
}

/// What a domain has of its host, beside its kernel.
#[derive(Debug, Default)]
pub struct Around<'a> {
    /// Its disks.
    pub disks: &'a [LocalDisk],
    /// The bridge of its cards.
    pub bridge: Option<&'a str>,
    /// Whether it has UEFI firmware, chosen by libvirt, and an emulated TPM.
    pub has_uefi_and_tpm: bool,
}

/// Returns the XML of a guest of the laboratory as a domain, whose QEMU is this one.
///
/// # Errors
/// When the guest boots from a disk, or has cards and there is no bridge.
pub fn domain_xml(
    guest: &GuestDescription,
    files: &KernelFiles,
    qemu: &Path,
    around: &Around<'_>,
) -> Result<String, LabError> {
    let Around { disks, bridge, .. } = *around;
    let refused = |message: &str| LabError::Answer {
        what: format!("the domain of {}", guest.name),
        message: message.to_owned(),
    };
    let Some(kernel) = &guest.kernel else {
        return Err(refused("it boots from a disk"));
    };
    let cards = match (bridge, guest.nics.as_slice()) {
        (_, []) => String::new(),
        (None, _) => return Err(refused("it has cards, and there is no bridge")),
        (Some(bridge), cards) => {
            let card = |card: &Nic| {
                format!(
                    "    <interface type='bridge'><mac address='{}'/><source bridge='{bridge}'/>\
                     <model type='virtio'/></interface>\n",
                    card.mac
                )
            };
            cards.iter().map(card).collect()
        }
    };
    let disk = |(letter, disk): (char, &LocalDisk)| {
        format!(
            "    <disk type='file' device='disk'><driver name='qemu' type='{}' discard='unmap'/>\
             <source file='{}'/><target dev='vd{letter}' bus='virtio'/></disk>\n",
            disk.kind.format.name(),
            disk.path.display()
        )
    };
    let disks: String = ('a'..='z').zip(disks).map(disk).collect();
    let channel = |name: &str| {
        format!(
            "    <channel type='unix'><source mode='bind'/><target type='virtio' name='{name}'/>\
             </channel>\n"
        )
    };
    let channels: String = guest.channels.iter().map(|it| channel(&it.name)).collect();
    // The test guests' kernel is not signed for Secure Boot.
    let (firmware, choice, tpm) = match around.has_uefi_and_tpm {
        true => (
            " firmware='efi'",
            "    <firmware><feature enabled='no' name='secure-boot'/></firmware>\n",
            "    <tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>\n",
        ),
        false => ("", "", ""),
    };
    Ok(format!(
        "\
<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{memory}</memory>
  <vcpu>{vcpus}</vcpu>
  <os{firmware}>
    <type arch='x86_64' machine='{machine}'>hvm</type>
{choice}    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>{line}</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='custom'><model>{cpu}</model></cpu>
  <devices>
    <emulator>{qemu}</emulator>
{disks}{cards}{channels}{tpm}    <console type='pty'/>
    <memballoon model='virtio'/>
  </devices>
</domain>
",
        name = guest.name,
        memory = guest.memory_mib,
        vcpus = guest.vcpus,
        machine = guest.machine,
        kernel = files.kernel.display(),
        initrd = files.initramfs.display(),
        line = kernel.command_line,
        cpu = guest.cpu,
        qemu = qemu.display(),
    ))
}
