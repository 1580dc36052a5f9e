//! What the agents of the two ends tell each other about a domain that moves.

use crate::migration::{Begun, Cookie as LibvirtCookie};
use crate::xdr::{Reader, Writer, XdrError};
use longhaul_hypervisor::manager::Cookie;
use longhaul_protocol::limits::COOKIE_BYTES_MAX;

/// What one daemon has for the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handoff {
    pub(super) begun: Begun,
    /// The domain as it is defined, which may differ from what runs.
    pub(super) defined: Option<String>,
    /// Whether it is started with its host.
    pub(super) autostarts: bool,
}

impl Handoff {
    /// As it travels: in XDR, the XML, libvirt's cookie, the definition if there is one, and
    /// whether the domain is started with its host.
    pub fn pack(&self) -> Cookie {
        let mut writer = Writer::default();
        writer.text(&self.begun.xml).opaque(&self.begun.cookie.0);
        writer.optional_text(self.defined.as_deref());
        writer.u32(u32::from(self.autostarts));
        Cookie(writer.into_bytes())
    }

    /// Reads the same.
    ///
    /// # Errors
    /// When it is something else.
    pub fn unpack(bytes: &[u8]) -> Result<Self, XdrError> {
        let mut reader = Reader::new(bytes);
        let handoff = Self {
            begun: Begun {
                xml: reader.text()?.to_owned(),
                cookie: LibvirtCookie(reader.opaque(COOKIE_BYTES_MAX)?.to_vec()),
            },
            defined: reader.optional(|it| it.text().map(str::to_owned))?,
            autostarts: reader.bool()?,
        };
        reader.end()?;
        Ok(handoff)
    }
}
