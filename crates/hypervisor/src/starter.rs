//! Identifies the program that started a guest's QEMU, and so could start a second copy of it, in
//! `/proc`.
//!
//! | sign in `/proc` | starter |
//! |---|---|
//! | the control socket of its folder on its command line | Longhaul |
//! | a scope `machine-qemu…`, or libvirt's monitor | libvirt |
//! | a scope `N.scope` in `qemu.slice`, or qemu-server's paths | Proxmox |
//! | a container's cgroup | a container's runtime |
//! | a service, or a scope that is not a login session | systemd |
//! | a parent that still runs | that program: a shell, a script |

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The maximum size of a file of `/proc` that is read, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The number of characters of a command line that are shown.
const SHOWN_CHARS_MAX: usize = 60;
/// Services that start arbitrary programs for users or tables, and so do not identify the starter.
const HOSTS_OF_OTHERS: [&str; 7] = [
    "ssh.service",
    "sshd.service",
    "cron.service",
    "crond.service",
    "atd.service",
    "getty@",
    "serial-getty@",
];

/// The starter of a guest's QEMU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Starter {
    /// An agent of Longhaul, here.
    Longhaul,
    /// libvirt.
    Libvirt {
        /// The domain's name.
        domain: String,
    },
    /// Proxmox VE.
    Proxmox {
        /// The guest's number there.
        id: u32,
    },
    /// A container runtime.
    Container {
        /// The container's name in the cgroup.
        name: String,
    },
    /// systemd.
    Unit {
        /// The unit.
        unit: String,
        /// Whether it belongs to a user's own manager.
        of_user: bool,
    },
    /// A program that still runs.
    Program {
        /// Its number.
        pid: i32,
        /// Its command line, shortened.
        command: String,
    },
    /// A program that has ended.
    Unknown,
}

/// The view of a process in `/proc`.
#[derive(Debug, Default)]
struct Seen {
    arguments: Vec<String>,
    cgroup: String,
    /// Number and command line of its parent, unless that is the machine's first process.
    parent: Option<(i32, Vec<String>)>,
}

impl Starter {
    /// Returns the starter of a QEMU by its process; `None` where that has ended. Longhaul starts
    /// the guest's QEMU with `own_socket` as its control socket.
    pub(crate) fn of(pid: i32, own_socket: &Path) -> io::Result<Option<Self>> {
        Ok(Seen::read(pid)?.map(|seen| seen.judge(own_socket)))
    }

    /// Returns the action that keeps it from starting a second copy, worded as a hint; `None` where
    /// Longhaul handles that.
    pub fn fence_hint(&self) -> Option<String> {
        let hint = match self {
            Self::Longhaul => return None,
            Self::Libvirt { domain } => format!(
                "virsh autostart --disable {domain}, and virsh undefine --keep-nvram {domain} \
                 (its XML kept elsewhere)"
            ),
            Self::Proxmox { id } => format!("qm set {id} --onboot 0 --lock migrate"),
            Self::Container { name } => {
                format!("take its restart policy from container {name}, without stopping it")
            }
            Self::Unit { unit, of_user } => {
                let user = if *of_user { " --user" } else { "" };
                format!(
                    "systemctl{user} disable {unit}, which must have no Restart= (do not stop it)"
                )
            }
            Self::Program { command, .. } => {
                format!("whatever keeps `{command}` from starting it again")
            }
            Self::Unknown => {
                "whatever keeps the script or person from starting it again".to_owned()
            }
        };
        Some(hint)
    }
}

impl fmt::Display for Starter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Longhaul => f.write_str("Longhaul"),
            Self::Libvirt { domain } => write!(f, "libvirt (domain {domain})"),
            Self::Proxmox { id } => write!(f, "Proxmox VE (guest {id})"),
            Self::Container { name } => write!(f, "a container ({name})"),
            Self::Unit { unit, .. } => write!(f, "systemd ({unit})"),
            Self::Program { pid, command } => write!(f, "`{command}` (pid {pid})"),
            Self::Unknown => f.write_str("something that has ended"),
        }
    }
}

impl Seen {
    fn read(pid: i32) -> io::Result<Option<Self>> {
        let Some(cgroup) = read(pid, "cgroup")? else {
            return Ok(None);
        };
        let Some(arguments) = read(pid, "cmdline")? else {
            return Ok(None);
        };
        let parent = read(pid, "stat")?.and_then(|stat| parent_of(&stat));
        let parent = match parent.filter(|pid| *pid > 1) {
            Some(pid) => read(pid, "cmdline")?.map(|line| (pid, words(&line))),
            None => None,
        };
        Ok(Some(Self {
            arguments: words(&arguments),
            cgroup,
            parent,
        }))
    }

    fn judge(&self, own_socket: &Path) -> Starter {
        let socket = own_socket.to_string_lossy().replace(',', ",,");
        let own = format!("socket,id=qmp,path={socket},");
        if self.arguments.iter().any(|word| word.starts_with(&own)) {
            return Starter::Longhaul;
        }
        let path = cgroup_path(&self.cgroup);
        let segments: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let of_manager = self
            .libvirt(&segments)
            .or_else(|| self.proxmox(&segments))
            .or_else(|| container(&segments));
        if let Some(starter) = of_manager.or_else(|| unit(&segments)) {
            return starter;
        }
        match &self.parent {
            Some((_, command)) if is_manager(command) => Starter::Unknown,
            Some((pid, command)) => Starter::Program {
                pid: *pid,
                command: shown(command),
            },
            None => Starter::Unknown,
        }
    }

    fn option(&self, name: &str) -> Option<&str> {
        let at = self.arguments.iter().position(|word| word == name)?;
        self.arguments.get(at + 1).map(String::as_str)
    }

    fn libvirt(&self, segments: &[&str]) -> Option<Starter> {
        let scoped = segments
            .iter()
            .any(|part| part.starts_with("machine-qemu") && part.ends_with(".scope"));
        let monitored = self.arguments.iter().any(|word| {
            word.starts_with("socket,id=charmonitor,") || word.contains("/libvirt/qemu/")
        });
        (scoped || monitored).then(|| Starter::Libvirt {
            domain: self.name().unwrap_or_else(|| "of unknown name".to_owned()),
        })
    }

    /// Returns the guest's name, from `-name NAME` or `-name guest=NAME,…`.
    fn name(&self) -> Option<String> {
        let text = self.option("-name")?;
        let text = text.strip_prefix("guest=").unwrap_or(text);
        // A comma in the name is doubled.
        let text = text.replace(",,", "\0");
        let name = text
            .split(',')
            .next()
            .unwrap_or_default()
            .replace('\0', ",");
        (!name.is_empty()).then(|| shown(&[name]))
    }

    fn proxmox(&self, segments: &[&str]) -> Option<Starter> {
        let number = |text: &str| text.parse().ok();
        let scoped = segments.windows(2).find_map(|pair| match pair {
            ["qemu.slice", scope] => number(scope.strip_suffix(".scope")?),
            _ => None,
        });
        let named = || {
            let mut words = self.arguments.iter();
            words
                .any(|word| word.contains("/qemu-server/"))
                .then(|| self.option("-id").and_then(number))
                .flatten()
        };
        scoped.or_else(named).map(|id| Starter::Proxmox { id })
    }
}

fn container(segments: &[&str]) -> Option<Starter> {
    let known = [
        "docker-",
        "libpod-",
        "crio-",
        "cri-containerd-",
        "lxc.payload.",
    ];
    let named = segments.iter().rev().find_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        known
            .iter()
            .find_map(|start| part.strip_prefix(start))
            .filter(|name| !name.is_empty())
    });
    let below = || {
        let place = segments
            .windows(2)
            .find(|pair| ["docker", "lxc", "libpod_parent"].contains(&pair[0]));
        place.map(|pair| pair[1])
    };
    let name = named.or_else(below)?;
    // Names are 64 hexadecimal digits, which are usually abbreviated to twelve.
    let name = name.chars().take(12).collect();
    Some(Starter::Container { name })
}

/// Returns the innermost unit that is not a login session.
fn unit(segments: &[&str]) -> Option<Starter> {
    let of_user = |part: &str| part.starts_with("user@") && part.ends_with(".service");
    let starts = |part: &&&str| {
        let a_unit = part.ends_with(".service") || part.ends_with(".scope");
        let a_login = part.starts_with("session-") || **part == "init.scope" || of_user(part);
        let of_others = HOSTS_OF_OTHERS.iter().any(|name| part.starts_with(name));
        a_unit && !a_login && !of_others
    };
    let found = segments.iter().rev().find(starts)?;
    Some(Starter::Unit {
        unit: shown(&[(*found).to_owned()]),
        of_user: segments.iter().any(|part| of_user(part)),
    })
}

/// Returns whether a program adopts orphans, so that being the parent proves nothing.
fn is_manager(command: &[String]) -> bool {
    let program = command.first().map_or("", String::as_str);
    let name = program.rsplit('/').next().unwrap_or_default();
    ["systemd", "init", "tini", "dumb-init"].contains(&name)
}

/// Returns the path used by systemd: that of cgroup v2, or v1's hierarchy of its own; else any.
fn cgroup_path(text: &str) -> &str {
    let mut found = "";
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(kind), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        // The unified hierarchy of a machine that still uses v1 may be empty.
        let of_systemd = kind == "name=systemd" || (kind.is_empty() && path != "/");
        if of_systemd {
            return path;
        }
        if path.len() > found.len() {
            found = path;
        }
    }
    found
}

/// Returns field 4 of `/proc/PID/stat`; the second, a name in brackets, may contain anything.
fn parent_of(stat: &str) -> Option<i32> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn words(cmdline: &str) -> Vec<String> {
    let words = cmdline.split('\0').map(str::to_owned);
    words.filter(|word| !word.is_empty()).collect()
}

/// Returns a command line for display: its content is untrusted.
fn shown(command: &[String]) -> String {
    let text = command.join(" ");
    let mut shown: String = text
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .take(SHOWN_CHARS_MAX)
        .collect();
    if text.chars().count() > SHOWN_CHARS_MAX {
        shown.push('…');
    }
    shown
}

/// Returns a file of a process; `None` where the process has ended.
fn read(pid: i32, name: &str) -> io::Result<Option<String>> {
    let gone = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH)
    };
    let mut bytes = Vec::new();
    let result = File::open(format!("/proc/{pid}/{name}"))
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes));
    match result {
        Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "/var/lib/longhaul/guests/web-7/run/qmp";

    fn judge(cgroup: &str, arguments: &str, parent: Option<(i32, &str)>) -> Starter {
        let split = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let seen = Seen {
            arguments: split(arguments),
            cgroup: cgroup.to_owned(),
            parent: parent.map(|(pid, command)| (pid, split(command))),
        };
        seen.judge(Path::new(OWN))
    }

    #[test]
    fn what_longhaul_started_is_known_by_its_socket() {
        let line = format!("qemu -chardev socket,id=qmp,path={OWN},server=on,wait=off");
        let cgroup = "0::/system.slice/longhaul-guest-web-7-1a2b3c4d.service\n";
        assert_eq!(judge(cgroup, &line, None), Starter::Longhaul);
        // The same name in another agent's folder does not match.
        let other = line.replace("/var/lib", "/srv");
        assert!(matches!(judge(cgroup, &other, None), Starter::Unit { .. }));
        assert_eq!(Starter::Longhaul.fence_hint(), None);
    }

    #[test]
    fn libvirt_is_known_by_its_scope_or_its_monitor() {
        let scope = "0::/machine.slice/machine-qemu\\x2d3\\x2dweb\\x2d7.scope/libvirt/emulator\n";
        let line = "/usr/bin/qemu-system-x86_64 -name guest=web,,7,debug-threads=on -S";
        let found = Starter::Libvirt {
            domain: "web,7".into(),
        };
        assert_eq!(judge(scope, line, None), found);
        assert!(
            found
                .fence_hint()
                .unwrap()
                .contains("virsh autostart --disable web,7")
        );
        // A user's session has no such scope.
        let session = "0::/user.slice/user-1000.slice/session-2.scope\n";
        let line = format!("{line} -chardev socket,id=charmonitor,fd=22,server=on,wait=off");
        assert_eq!(judge(session, &line, Some((1, "/sbin/init"))), found);
    }

    #[test]
    fn proxmox_is_known_by_its_scope_or_its_paths() {
        let found = Starter::Proxmox { id: 104 };
        let line = "/usr/bin/kvm -id 104 -name web-7,debug-threads=on -daemonize";
        assert_eq!(judge("0::/qemu.slice/104.scope\n", line, None), found);
        let line = format!("{line} -pidfile /var/run/qemu-server/104.pid");
        assert_eq!(judge("0::/\n", &line, None), found);
        assert_eq!(
            found.fence_hint().unwrap(),
            "qm set 104 --onboot 0 --lock migrate"
        );
    }

    #[test]
    fn units_are_found_in_both_kinds_of_cgroups() {
        let unit = |unit: &str, of_user| Starter::Unit {
            unit: unit.to_owned(),
            of_user,
        };
        let v1 = "12:pids:/system.slice/web-7.service\n1:name=systemd:/system.slice/web-7.service\n\
                  0::/\n";
        for (cgroup, expected) in [
            (
                "0::/system.slice/web-7.service\n",
                unit("web-7.service", false),
            ),
            (v1, unit("web-7.service", false)),
            (
                "0::/system.slice/system-vm.slice/vm@web\\x2d7.service\n",
                unit("vm@web\\x2d7.service", false),
            ),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/web-7.service\n",
                unit("web-7.service", true),
            ),
            (
                "0::/system.slice/run-r1a2b.scope\n",
                unit("run-r1a2b.scope", false),
            ),
        ] {
            assert_eq!(judge(cgroup, "qemu", Some((1, "systemd"))), expected);
        }
        let hint = unit("web-7.service", true).fence_hint().unwrap();
        assert!(
            hint.starts_with("systemctl --user disable web-7.service"),
            "{hint}"
        );
    }

    #[test]
    fn containers_are_named_as_people_name_them() {
        let id = "4f5c8e1d2b3a4f5c8e1d2b3a4f5c8e1d2b3a4f5c8e1d2b3a4f5c8e1d2b3a4f5c";
        let container = |name: &str| Starter::Container {
            name: name.to_owned(),
        };
        for cgroup in [
            format!("0::/system.slice/docker-{id}.scope\n"),
            format!("1:name=systemd:/docker/{id}\n"),
            format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope\n"),
            format!("0::/machine.slice/libpod-{id}.scope/container\n"),
        ] {
            assert_eq!(
                judge(&cgroup, "qemu", None),
                container("4f5c8e1d2b3a"),
                "{cgroup}"
            );
        }
    }

    #[test]
    fn a_script_or_a_terminal_is_known_by_the_parent() {
        let login = "0::/user.slice/user-0.slice/session-5.scope\n";
        let by = |command: &str| Starter::Program {
            pid: 812,
            command: command.to_owned(),
        };
        let parent = Some((812, "bash /root/start-web-7"));
        assert_eq!(judge(login, "qemu", parent), by("bash /root/start-web-7"));
        let ssh = "0::/system.slice/ssh.service\n";
        assert_eq!(judge(ssh, "qemu", Some((812, "-bash"))), by("-bash"));
        // Daemonized: its parent has ended, and another process adopted it.
        for manager in ["/sbin/init", "/usr/lib/systemd/systemd --user", "tini -- x"] {
            assert_eq!(judge(login, "qemu", Some((77, manager))), Starter::Unknown);
        }
        assert_eq!(judge("0::/\n", "qemu", None), Starter::Unknown);
        let long = format!("sh\x1b {}", "x".repeat(200));
        let Starter::Program { command, .. } = judge(login, "qemu", Some((812, &long))) else {
            panic!("another starter");
        };
        assert!(command.starts_with("sh? xx") && command.chars().count() == SHOWN_CHARS_MAX + 1);
    }

    #[test]
    fn a_real_process_is_looked_at() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let seen = Seen::read(pid).unwrap().unwrap();
        assert_eq!(
            seen.parent.as_ref().map(|(pid, _)| *pid),
            Some(std::process::id() as i32)
        );
        assert!(!seen.cgroup.is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Seen::read(pid).unwrap().is_none());
    }
}
