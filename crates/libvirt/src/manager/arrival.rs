//! What libvirt gets for a domain that arrives, and what can be known of that before a move.

use super::following::keeps_memory_from_following;
use super::{Handoff, Libvirt, MONITOR};
use crate::capabilities::LaunchedWith;
use crate::connection::LibvirtError;
use crate::domain::Xml;
use crate::migration::{Begun, Cookie as LibvirtCookie};
use crate::notes::{Definition, Role};
use crate::sockets;
use crate::xml::{DomainXml, XmlError};
use longhaul_hypervisor::manager::Guest;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::{Check, Verdict};

/// What libvirt gets for a domain that arrives.
pub(super) struct Accepted {
    pub(super) uuid: String,
    pub(super) xml: String,
    pub(super) definition: Option<Definition>,
}

/// Why a guest is not taken that has left, while something of it is still here.
pub(super) const STILL_HERE: &str =
    "it has left this host, and libvirt has not ended it here yet: try again";

pub(super) fn refused(text: String, hint: Option<&str>) -> Check {
    Check {
        verdict: Verdict::Refused,
        text,
        hint: hint.map(str::to_owned),
    }
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
