//! The phases of a migration, version 3: each is one call, and the caller decides whether and when
//! the next one follows.
//!
//! ```text
//! source                                    destination
//! begin    the job that keeps others out
//!          XML, cookie ───────────────────▶ prepare   a QEMU that waits, on a socket
//!            ◀────────────────────── cookie
//! perform  QEMU's stream, into a socket
//!          cookie ────────────────────────▶ finish    the guest runs there, or is gone there
//! confirm  the guest is gone here, or runs here
//! ```
//!
//! A job belongs to the connection that began it, or prepared it. When the connection ends, the
//! daemon lets a guest run on whose stream was not sent, and ends a QEMU that waits for one.

use crate::connection::{CALL_TIMEOUT, Connection, LibvirtError, Procedure, Refusal};
use crate::domain::Domain;
use crate::xdr::{Reader, Writer, XdrError};
use std::time::Duration;

const DOMAIN_MIGRATE_BEGIN3_PARAMS: Procedure =
    Procedure::remote(302, "DOMAIN_MIGRATE_BEGIN3_PARAMS");
const DOMAIN_MIGRATE_PREPARE3_PARAMS: Procedure =
    Procedure::remote(303, "DOMAIN_MIGRATE_PREPARE3_PARAMS");
const DOMAIN_MIGRATE_PERFORM3_PARAMS: Procedure =
    Procedure::remote(305, "DOMAIN_MIGRATE_PERFORM3_PARAMS");
const DOMAIN_MIGRATE_FINISH3_PARAMS: Procedure =
    Procedure::remote(306, "DOMAIN_MIGRATE_FINISH3_PARAMS");
const DOMAIN_MIGRATE_CONFIRM3_PARAMS: Procedure =
    Procedure::remote(307, "DOMAIN_MIGRATE_CONFIRM3_PARAMS");

/// The maximum length of a cookie that is read: `REMOTE_MIGRATE_COOKIE_MAX`.
pub const COOKIE_BYTES_MAX: usize = 4 << 20;
/// A migration may take as long as it takes: it ends with the socket, or with the connection.
const PERFORM_TIMEOUT: Duration = Duration::from_secs(365 * 24 * 3600);
/// The time for a destination to start a QEMU, or to end one.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(120);
/// The type of a parameter that is a string (`VIR_TYPED_PARAM_STRING`).
const STRING: u32 = 7;

/// What a migration is to do (`virDomainMigrateFlags`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags(u32);

impl Flags {
    /// The guest runs meanwhile, its definition is not changed by others, and it is not defined at
    /// the source any more. At the destination it is transient: a definition would come from the
    /// other daemon, as it is.
    pub const LIVE: Self = Self(LIVE | UNDEFINE_SOURCE | CHANGE_PROTECTION);
    /// Disks need not be shared, and their caches need not be off: their content is Longhaul's
    /// affair.
    pub const UNSAFE: Self = Self(1 << 9);

    /// The guest stays paused at the destination.
    pub const PAUSED: Self = Self(1 << 5);
    /// The guest runs at the destination before all of its memory has arrived.
    pub const POSTCOPY: Self = Self(1 << 15);

    /// Returns both.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

const LIVE: u32 = 1;
const UNDEFINE_SOURCE: u32 = 1 << 4;
const CHANGE_PROTECTION: u32 = 1 << 8;

/// A cookie: what one daemon tells the other. Its content is libvirt's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cookie(pub Vec<u8>);

/// How a phase ends a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The guest moves.
    Moved,
    /// The guest stays.
    Cancelled,
}

impl Outcome {
    fn cancelled(self) -> u32 {
        u32::from(self == Self::Cancelled)
    }
}

/// What begins at the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// The XML of the domain, for the destination.
    pub xml: String,
    /// For [`Connection::prepare`].
    pub cookie: Cookie,
}

/// Writes parameters that are all strings.
fn parameters(writer: &mut Writer, parameters: &[(&str, &str)]) {
    writer.u32(parameters.len() as u32);
    for (name, value) in parameters {
        writer.text(name).u32(STRING).text(value);
    }
}

fn cookie(reader: &mut Reader<'_>) -> Result<Cookie, XdrError> {
    Ok(Cookie(reader.opaque(COOKIE_BYTES_MAX)?.to_vec()))
}

impl Connection {
    /// Begins a migration at its source: from now on the domain has a job that others wait for.
    ///
    /// # Errors
    /// When it does not run, has a job already, or cannot migrate, with libvirt's reason.
    pub fn begin(&self, domain: &Domain, flags: Flags) -> Result<Begun, LibvirtError> {
        let mut arguments = Writer::default();
        domain.write(&mut arguments);
        parameters(&mut arguments, &[]);
        arguments.u32(flags.0);
        self.ask(DOMAIN_MIGRATE_BEGIN3_PARAMS, arguments, |it| {
            Ok(Begun {
                cookie: cookie(it)?,
                xml: it.text()?.to_owned(),
            })
        })
    }

    /// Prepares the destination: a QEMU that waits on `uri` for its stream. It is as `xml` says.
    /// Its user must be able to make a socket there.
    ///
    /// # Errors
    /// When the domain runs here, or cannot run here, with libvirt's reason.
    pub fn prepare(
        &self,
        begun: &Cookie,
        xml: &str,
        uri: &str,
        flags: Flags,
    ) -> Result<Cookie, LibvirtError> {
        let mut arguments = Writer::default();
        parameters(
            &mut arguments,
            &[("destination_xml", xml), ("migrate_uri", uri)],
        );
        arguments.opaque(&begun.0).u32(flags.0);
        let procedure = DOMAIN_MIGRATE_PREPARE3_PARAMS;
        self.ask_within(procedure, arguments, LAUNCH_TIMEOUT, |it| {
            let cookie = cookie(it)?;
            // The URI that the daemon would have chosen.
            it.optional(Reader::text)?;
            Ok(cookie)
        })
    }

    /// Lets the source's QEMU write its stream to the socket of `uri`, which must listen. Returns
    /// when all of it was written and QEMU has said so; the guest is then stopped.
    ///
    /// # Errors
    /// When the stream ended early. The guest then needs [`Connection::confirm`], which lets it run
    /// on. Without a cookie the daemon is not asked: that of libvirt 9.0 would die.
    pub fn perform(
        &self,
        domain: &Domain,
        prepared: &Cookie,
        uri: &str,
        flags: Flags,
    ) -> Result<Cookie, LibvirtError> {
        let procedure = DOMAIN_MIGRATE_PERFORM3_PARAMS;
        if prepared.0.is_empty() {
            return Err(LibvirtError::Refused(Refusal {
                procedure: procedure.name,
                code: 0,
                message: "the destination's daemon has sent no cookie".to_owned(),
            }));
        }
        let mut arguments = Writer::default();
        domain.write(&mut arguments);
        arguments.optional_text(None);
        parameters(&mut arguments, &[("migrate_uri", uri)]);
        arguments.opaque(&prepared.0).u32(flags.0);
        self.ask_within(procedure, arguments, PERFORM_TIMEOUT, cookie)
    }

    /// Ends a migration at its destination: the guest runs there from now on. Returns the domain,
    /// by post-copy when all of its memory has arrived.
    ///
    /// # Errors
    /// When it does not run. Only libvirt knows whether it has run.
    pub fn finish(
        &self,
        name: &str,
        performed: &Cookie,
        flags: Flags,
    ) -> Result<(Domain, Cookie), LibvirtError> {
        self.end_at_destination(name, performed, Outcome::Moved, flags)
    }

    /// Gives up a migration at its destination: the QEMU there is ended.
    ///
    /// # Errors
    /// When there is no such migration.
    pub fn finish_cancelled(&self, name: &str, flags: Flags) -> Result<(), LibvirtError> {
        let cookie = Cookie::default();
        match self.end_at_destination(name, &cookie, Outcome::Cancelled, flags) {
            Ok(_) => Ok(()),
            Err(LibvirtError::Refused(refusal)) if refusal.is_cancelled() => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn end_at_destination(
        &self,
        name: &str,
        performed: &Cookie,
        outcome: Outcome,
        flags: Flags,
    ) -> Result<(Domain, Cookie), LibvirtError> {
        let mut arguments = Writer::default();
        parameters(&mut arguments, &[("destination_name", name)]);
        arguments.opaque(&performed.0).u32(flags.0);
        arguments.u32(outcome.cancelled());
        let procedure = DOMAIN_MIGRATE_FINISH3_PARAMS;
        let timeout = match flags.has(Flags::POSTCOPY) {
            true => PERFORM_TIMEOUT,
            false => LAUNCH_TIMEOUT,
        };
        self.ask_within(procedure, arguments, timeout, |it| {
            Ok((Domain::read(it)?, cookie(it)?))
        })
    }

    /// Ends a migration at its source: the guest is ended there and undefined, or runs on.
    ///
    /// # Errors
    /// When the domain has no such migration.
    pub fn confirm(
        &self,
        domain: &Domain,
        finished: &Cookie,
        outcome: Outcome,
        flags: Flags,
    ) -> Result<(), LibvirtError> {
        let mut arguments = Writer::default();
        domain.write(&mut arguments);
        parameters(&mut arguments, &[]);
        arguments.opaque(&finished.0).u32(flags.0);
        arguments.u32(outcome.cancelled());
        self.ask_within(
            DOMAIN_MIGRATE_CONFIRM3_PARAMS,
            arguments,
            CALL_TIMEOUT,
            |_| Ok(()),
        )
    }
}
