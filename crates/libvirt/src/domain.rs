//! Domains: which there are, what their XML says, and their state.

use crate::connection::{Connection, LibvirtError, Procedure};
use crate::xdr::{Reader, Writer, XdrError};
use std::fmt;

const DOMAIN_DEFINE_XML: Procedure = Procedure::remote(11, "DOMAIN_DEFINE_XML");
const DOMAIN_CREATE: Procedure = Procedure::remote(9, "DOMAIN_CREATE");
const DOMAIN_DESTROY: Procedure = Procedure::remote(12, "DOMAIN_DESTROY");
const DOMAIN_GET_XML_DESC: Procedure = Procedure::remote(14, "DOMAIN_GET_XML_DESC");
const DOMAIN_GET_AUTOSTART: Procedure = Procedure::remote(15, "DOMAIN_GET_AUTOSTART");
const DOMAIN_LOOKUP_BY_NAME: Procedure = Procedure::remote(23, "DOMAIN_LOOKUP_BY_NAME");
const DOMAIN_RESUME: Procedure = Procedure::remote(28, "DOMAIN_RESUME");
const DOMAIN_SET_AUTOSTART: Procedure = Procedure::remote(29, "DOMAIN_SET_AUTOSTART");
const DOMAIN_IS_PERSISTENT: Procedure = Procedure::remote(151, "DOMAIN_IS_PERSISTENT");
const DOMAIN_HAS_MANAGED_SAVE_IMAGE: Procedure =
    Procedure::remote(183, "DOMAIN_HAS_MANAGED_SAVE_IMAGE");
const DOMAIN_SNAPSHOT_NUM: Procedure = Procedure::remote(187, "DOMAIN_SNAPSHOT_NUM");
const DOMAIN_GET_STATE: Procedure = Procedure::remote(212, "DOMAIN_GET_STATE");
const DOMAIN_UNDEFINE_FLAGS: Procedure = Procedure::remote(231, "DOMAIN_UNDEFINE_FLAGS");
const CONNECT_LIST_ALL_DOMAINS: Procedure = Procedure::remote(273, "CONNECT_LIST_ALL_DOMAINS");
const DOMAIN_MONITOR_COMMAND: Procedure = Procedure::qemu(1, "DOMAIN_MONITOR_COMMAND");

/// Keeps the firmware variables of a domain that is undefined (`VIR_DOMAIN_UNDEFINE_KEEP_NVRAM`).
const UNDEFINE_KEEP_NVRAM: u32 = 1 << 3;

/// Domains that run, and others (`VIR_CONNECT_LIST_DOMAINS_ACTIVE` and `_INACTIVE`).
const ACTIVE: u32 = 1;
const INACTIVE: u32 = 2;

/// A domain as libvirt identifies it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Its name, unique on its host.
    pub name: String,
    /// Its UUID, the same on all hosts.
    pub uuid: [u8; 16],
    /// Its number while it runs.
    pub id: Option<u32>,
}

impl Domain {
    pub(crate) fn write(&self, writer: &mut Writer) {
        let id = self.id.and_then(|id| i32::try_from(id).ok());
        writer
            .text(&self.name)
            .fixed(&self.uuid)
            .i32(id.unwrap_or(-1));
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, XdrError> {
        Ok(Self {
            name: reader.text()?.to_owned(),
            uuid: reader.fixed()?,
            id: u32::try_from(reader.i32()?).ok(),
        })
    }

    fn arguments(&self) -> Writer {
        let mut writer = Writer::default();
        self.write(&mut writer);
        writer
    }

    fn with_flags(&self, flags: u32) -> Writer {
        let mut writer = self.arguments();
        writer.u32(flags);
        writer
    }

    /// Returns its UUID as it is written.
    pub fn uuid_text(&self) -> String {
        let hex: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|range| &hex[range]);
        parts.join("-")
    }
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Which XML of a domain is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Xml {
    /// As it runs now.
    Live,
    /// As it is defined.
    Defined,
}

impl Xml {
    fn flags(self) -> u32 {
        match self {
            Self::Live => 0,
            // VIR_DOMAIN_XML_INACTIVE
            Self::Defined => 1 << 1,
        }
    }
}

/// What a domain does (`virDomainState`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DomainState {
    /// It runs.
    Running,
    /// It runs, and its memory follows by post-copy.
    Postcopy,
    /// It is paused, for this reason.
    Paused(PausedFor),
    /// It is being shut down.
    ShuttingDown,
    /// It does not run.
    Off,
    /// It has crashed.
    Crashed,
    /// Its operating system has suspended it.
    Suspended,
    /// Another state, by libvirt's number.
    Other(u32),
}

/// Why a domain is paused (`virDomainPausedReason`), as far as migrations need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PausedFor {
    /// Somebody has paused it.
    User,
    /// A migration.
    Migration,
    /// An error of its disks.
    IoError,
    /// It is being started.
    Starting,
    /// A migration by post-copy, which goes on.
    Postcopy,
    /// A migration by post-copy, which was interrupted.
    PostcopyFailed,
    /// Another reason, by libvirt's number.
    Other(u32),
}

fn state(state: u32, reason: u32) -> DomainState {
    match state {
        1 if [10, 11].contains(&reason) => DomainState::Postcopy,
        // 2 is a domain that waits for something, which no QEMU is.
        1 | 2 => DomainState::Running,
        3 => DomainState::Paused(match reason {
            1 => PausedFor::User,
            2 => PausedFor::Migration,
            5 => PausedFor::IoError,
            11 => PausedFor::Starting,
            12 => PausedFor::Postcopy,
            13 => PausedFor::PostcopyFailed,
            other => PausedFor::Other(other),
        }),
        4 => DomainState::ShuttingDown,
        5 => DomainState::Off,
        6 => DomainState::Crashed,
        7 => DomainState::Suspended,
        other => DomainState::Other(other),
    }
}

impl Connection {
    /// Returns all domains.
    ///
    /// # Errors
    /// When libvirt does not answer.
    pub fn domains(&self) -> Result<Vec<Domain>, LibvirtError> {
        let mut arguments = Writer::default();
        arguments.u32(1).u32(ACTIVE | INACTIVE);
        self.ask(CONNECT_LIST_ALL_DOMAINS, arguments, |it| {
            let domains = it.array(Domain::read)?;
            // Their number, once more.
            it.u32()?;
            Ok(domains)
        })
    }

    /// Returns the domain with this name, if there is one.
    ///
    /// # Errors
    /// When libvirt does not answer.
    pub fn domain(&self, name: &str) -> Result<Option<Domain>, LibvirtError> {
        let mut arguments = Writer::default();
        arguments.text(name);
        match self.ask(DOMAIN_LOOKUP_BY_NAME, arguments, Domain::read) {
            Ok(domain) => Ok(Some(domain)),
            Err(error) if error.is_no_domain() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the XML of a domain, without its secrets.
    ///
    /// # Errors
    /// When it is not there.
    pub fn xml(&self, domain: &Domain, which: Xml) -> Result<String, LibvirtError> {
        let arguments = domain.with_flags(which.flags());
        self.ask(DOMAIN_GET_XML_DESC, arguments, |it| {
            it.text().map(str::to_owned)
        })
    }

    /// Returns the state of a domain.
    ///
    /// # Errors
    /// When it is not there.
    pub fn state(&self, domain: &Domain) -> Result<DomainState, LibvirtError> {
        self.ask(DOMAIN_GET_STATE, domain.with_flags(0), |it| {
            Ok(state(it.u32()?, it.u32()?))
        })
    }

    /// Returns whether a domain stays defined when it does not run.
    ///
    /// # Errors
    /// When it is not there.
    pub fn is_persistent(&self, domain: &Domain) -> Result<bool, LibvirtError> {
        self.ask(DOMAIN_IS_PERSISTENT, domain.arguments(), |it| it.bool())
    }

    /// Returns whether a domain is started with its host.
    ///
    /// # Errors
    /// When it is not there.
    pub fn autostarts(&self, domain: &Domain) -> Result<bool, LibvirtError> {
        self.ask(DOMAIN_GET_AUTOSTART, domain.arguments(), |it| it.bool())
    }

    /// Sets whether a domain is started with its host.
    ///
    /// # Errors
    /// When it is not there, or not persistent.
    pub fn set_autostart(&self, domain: &Domain, starts: bool) -> Result<(), LibvirtError> {
        let mut arguments = domain.arguments();
        arguments.u32(u32::from(starts));
        self.run(DOMAIN_SET_AUTOSTART, arguments)
    }

    /// Starts a domain that is defined.
    ///
    /// # Errors
    /// When libvirt cannot, with its reason.
    pub fn start(&self, domain: &Domain) -> Result<(), LibvirtError> {
        self.run(DOMAIN_CREATE, domain.arguments())
    }

    /// Returns how many snapshots libvirt knows of a domain.
    ///
    /// # Errors
    /// When it is not there.
    pub fn snapshots(&self, domain: &Domain) -> Result<u32, LibvirtError> {
        self.ask(DOMAIN_SNAPSHOT_NUM, domain.with_flags(0), |it| it.u32())
    }

    /// Returns whether a domain has a saved state, from which its next start goes on.
    ///
    /// # Errors
    /// When it is not there.
    pub fn has_saved_state(&self, domain: &Domain) -> Result<bool, LibvirtError> {
        let arguments = domain.with_flags(0);
        self.ask(DOMAIN_HAS_MANAGED_SAVE_IMAGE, arguments, |it| it.bool())
    }

    /// Defines a domain: as it will be from its next start on, if it runs.
    ///
    /// # Errors
    /// When libvirt refuses the XML.
    pub fn define(&self, xml: &str) -> Result<Domain, LibvirtError> {
        let mut arguments = Writer::default();
        arguments.text(xml);
        self.ask(DOMAIN_DEFINE_XML, arguments, Domain::read)
    }

    /// Lets a paused domain run.
    ///
    /// # Errors
    /// When it is not there, or not paused.
    pub fn resume(&self, domain: &Domain) -> Result<(), LibvirtError> {
        self.run(DOMAIN_RESUME, domain.arguments())
    }

    /// Ends the QEMU of a domain at once.
    ///
    /// # Errors
    /// When it does not run.
    pub fn destroy(&self, domain: &Domain) -> Result<(), LibvirtError> {
        self.run(DOMAIN_DESTROY, domain.arguments())
    }

    /// Removes the definition of a domain. The file of its firmware variables stays.
    ///
    /// # Errors
    /// When it is not defined.
    pub fn undefine(&self, domain: &Domain) -> Result<(), LibvirtError> {
        let arguments = domain.with_flags(UNDEFINE_KEEP_NVRAM);
        self.run(DOMAIN_UNDEFINE_FLAGS, arguments)
    }

    /// Sends a line of QMP to a domain's QEMU, and returns its answer. libvirt marks the domain as
    /// tainted by a monitor that is not its own.
    ///
    /// # Errors
    /// When it does not run. A refusal by QEMU is an answer.
    pub fn monitor_command(&self, domain: &Domain, line: &str) -> Result<String, LibvirtError> {
        let mut arguments = domain.arguments();
        arguments.text(line).u32(0);
        self.ask(DOMAIN_MONITOR_COMMAND, arguments, |it| {
            it.text().map(str::to_owned)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_read_as_it_was_written() {
        for id in [None, Some(3)] {
            let domain = Domain {
                name: "web-7".to_owned(),
                uuid: std::array::from_fn(|at| at as u8),
                id,
            };
            let bytes = domain.arguments().into_bytes();
            let mut reader = Reader::new(&bytes);
            assert_eq!(Domain::read(&mut reader), Ok(domain.clone()));
            assert_eq!(reader.end(), Ok(()));
            let text = "00010203-0405-0607-0809-0a0b0c0d0e0f";
            assert_eq!(domain.uuid_text(), text);
        }
    }
}
