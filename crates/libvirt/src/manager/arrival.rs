//! What libvirt gets for a domain that arrives, and what can be known of that before a move.

use super::{Handoff, Libvirt, MONITOR};
use crate::capabilities::LaunchedWith;
use crate::connection::{Connection, LibvirtError};
use crate::domain::Xml;
use crate::migration::{Begun, Cookie as LibvirtCookie};
use crate::notes::{Definition, Role};
use crate::sockets;
use crate::xml::{DomainXml, XmlError};
use longhaul_hypervisor::manager::Guest;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::{Check, Verdict};
use std::fs;
use std::process::Command;

/// The first version whose QEMUs may open `/dev/userfaultfd`.
const LETS_OPEN: [u64; 3] = [10, 1, 0];
/// The first version of QEMU that opens it.
const OPENS: [u64; 2] = [8, 1];
/// The kernel's setting for programs without privileges.
const UNPRIVILEGED: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// What libvirt gets for a domain that arrives.
pub(super) struct Accepted {
    pub(super) uuid: String,
    pub(super) xml: String,
    pub(super) definition: Option<Definition>,
}

/// Why a guest is not taken that has left, while something of it is still here.
pub(super) const STILL_HERE: &str =
    "it has left this host, and libvirt has not ended it here yet: try again";

fn refused(text: String, hint: Option<&str>) -> Check {
    Check {
        verdict: Verdict::Refused,
        text,
        hint: hint.map(str::to_owned),
    }
}

/// Returns what keeps the memory of a guest from following it. Newer daemons let their QEMUs open
/// `/dev/userfaultfd`, others leave it to the kernel's setting.
fn keeps_memory_from_following(
    guest: &str,
    connection: &Connection,
    emulator: &str,
) -> Option<Check> {
    let cannot = |why: &str| format!("the memory of {guest} cannot follow it: {why}");
    // Without the file the kernel knows no such limit.
    let setting = fs::read_to_string(UNPRIVILEGED);
    if setting.is_err() || setting.is_ok_and(|setting| setting.trim() != "0") {
        return None;
    }
    let version = match connection.version() {
        Ok(version) => version,
        Err(error) => return Some(refused(cannot(&error.to_string()), None)),
    };
    let (what, newer) = match version >= LETS_OPEN {
        true => match version_of(emulator) {
            Some(version) if version < OPENS => ("QEMU", "8.1"),
            // One that does not say is asked when it has been launched.
            _ => return None,
        },
        false => ("libvirt", "10.1"),
    };
    let why = format!("{what} is older than {newer}, so the guest's QEMU cannot use userfaultfd");
    let hint = format!(
        "set vm.unprivileged_userfaultfd = 1 there, or update {what} to {newer} or later; or leave \
         out --strategy"
    );
    Some(refused(cannot(&why), Some(&hint)))
}

/// Returns the version of an emulator, major and minor.
fn version_of(emulator: &str) -> Option<[u64; 2]> {
    let said = Command::new(emulator).arg("--version").output().ok()?;
    read_version(&String::from_utf8(said.stdout).ok()?)
}

fn read_version(said: &str) -> Option<[u64; 2]> {
    let (_, version) = said.lines().next()?.split_once(" version ")?;
    let mut numbers = version.split(|it: char| !it.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some([number()?, number()?])
}

impl Libvirt {
    /// Checks what another host has sent, and makes it this host's.
    pub(super) fn accept(
        &self,
        guest: &GuestDescription,
        handoff: &Handoff,
    ) -> Result<Accepted, XmlError> {
        let read = DomainXml::read(&handoff.begun.xml)?;
        let monitor = sockets::made_by_qemu_as_seen(MONITOR, &guest.name);
        let xml = read.with_monitor(guest, &self.config, &monitor.display().to_string())?;
        let defined = handoff.defined.as_deref();
        let defined = defined.map(|xml| {
            let defined = DomainXml::read(xml)?;
            defined.for_host(&read.defined(&defined, guest), &self.config)
        });
        let autostarts = handoff.autostarts;
        Ok(Accepted {
            uuid: read.uuid().unwrap_or_default().to_owned(),
            xml,
            definition: defined
                .transpose()?
                .map(|xml| Definition { xml, autostarts }),
        })
    }

    /// Returns what a destination needs for its checks, without a migration that has begun.
    pub(super) fn outlook(&self, guest: &Guest) -> Result<Option<Handoff>, LibvirtError> {
        let Some(connection) = self.queries()? else {
            return Ok(None);
        };
        let Some(domain) = connection.domain(guest.name())? else {
            return Ok(None);
        };
        Ok(Some(Handoff {
            defined: match connection.is_persistent(&domain)? {
                true => Some(connection.xml(&domain, Xml::Defined)?),
                false => None,
            },
            autostarts: false,
            begun: Begun {
                xml: connection.xml(&domain, Xml::Live)?,
                cookie: LibvirtCookie::default(),
            },
        }))
    }

    /// Returns what keeps a guest from coming here.
    pub(super) fn obstacles(
        &self,
        guest: &GuestDescription,
        outlook: &[u8],
        follows: bool,
    ) -> Option<Check> {
        let cannot = |why: &str| format!("libvirt cannot take {}: {why}", guest.name);
        let connection = match self.queries() {
            Ok(Some(connection)) => connection,
            Ok(None) => {
                let hint = "start it there, or install libvirt-daemon-system";
                return Some(refused("there is no libvirt".to_owned(), Some(hint)));
            }
            Err(error) => {
                let hint = "see there: systemctl status libvirtd (or virtqemud)";
                return Some(refused(cannot(&error.to_string()), Some(hint)));
            }
        };
        match self.notes.read(&guest.name) {
            Ok(Some(note)) if note.role == Role::Left => {
                return Some(refused(cannot(STILL_HERE), None));
            }
            Ok(_) => {}
            Err(error) => return Some(refused(cannot(&error.to_string()), None)),
        }
        let handoff = match Handoff::unpack(outlook) {
            Ok(handoff) => handoff,
            Err(error) => return Some(refused(cannot(&error.to_string()), None)),
        };
        let accepted = match self.accept(guest, &handoff) {
            Ok(accepted) => accepted,
            Err(error) => return Some(refused(cannot(&error.text), Some(&error.hint))),
        };
        let read = match DomainXml::read(&accepted.xml) {
            Ok(read) => read,
            Err(error) => return Some(refused(cannot(&error.text), Some(&error.hint))),
        };
        let with = LaunchedWith {
            emulator: read.emulator()?,
            arch: read.arch()?,
            machine: &guest.machine,
            kind: read.kind()?,
        };
        let can = match connection.domain_capabilities(&with) {
            Ok(can) => can,
            Err(error) => {
                let hint = "the destination needs this emulator at this path";
                return Some(refused(cannot(&error.to_string()), Some(hint)));
            }
        };
        if read.has_tpm() && can.emulates_tpms == Some(false) {
            let hint = "install swtpm and swtpm-tools there";
            return Some(refused(cannot("it has no emulated TPMs"), Some(hint)));
        }
        match follows {
            true => keeps_memory_from_following(&guest.name, &connection, with.emulator),
            false => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulator_s_version_is_read() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright …\n";
        assert_eq!(read_version(debian), Some([7, 2]));
        assert_eq!(
            read_version("QEMU emulator version 11.1.0\n"),
            Some([11, 1])
        );
        for nothing in [
            "",
            "QEMU\n",
            "QEMU emulator version \n",
            "a version of QEMU",
        ] {
            assert_eq!(read_version(nothing), None, "{nothing:?}");
        }
    }
}
