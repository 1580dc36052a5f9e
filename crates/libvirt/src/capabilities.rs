//! What a daemon can do, as it says itself.

use crate::connection::{Connection, LibvirtError, Procedure};
use crate::xdr::Writer;
use crate::xml::child;
use roxmltree::{Document, Node};

const CONNECT_GET_CAPABILITIES: Procedure = Procedure::remote(7, "CONNECT_GET_CAPABILITIES");
const CONNECT_GET_DOMAIN_CAPABILITIES: Procedure =
    Procedure::remote(342, "CONNECT_GET_DOMAIN_CAPABILITIES");

/// What a domain is launched with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchedWith<'a> {
    /// The path of its QEMU.
    pub emulator: &'a str,
    /// The processor, such as `x86_64`.
    pub arch: &'a str,
    /// The machine type.
    pub machine: &'a str,
    /// How it runs: `kvm` or `qemu`.
    pub kind: &'a str,
}

/// What a daemon can give to domains that are launched in one way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainCapabilities {
    /// Whether they can have emulated TPMs. None where the daemon does not say.
    pub emulates_tpms: Option<bool>,
}

impl Connection {
    /// Returns the user and the group of the daemon's QEMUs, if it changes them.
    ///
    /// # Errors
    /// When libvirt does not answer.
    pub fn account_of_qemu(&self) -> Result<Option<(u32, u32)>, LibvirtError> {
        let capabilities = self.ask(CONNECT_GET_CAPABILITIES, Writer::default(), |it| {
            it.text().map(str::to_owned)
        })?;
        Ok(account(&capabilities))
    }

    /// Returns what domains can have that are launched so.
    ///
    /// # Errors
    /// When libvirt cannot launch any so, with its reason.
    pub fn domain_capabilities(
        &self,
        with: &LaunchedWith<'_>,
    ) -> Result<DomainCapabilities, LibvirtError> {
        let mut arguments = Writer::default();
        for text in [with.emulator, with.arch, with.machine, with.kind] {
            arguments.optional_text(Some(text));
        }
        arguments.u32(0);
        let capabilities = self.ask(CONNECT_GET_DOMAIN_CAPABILITIES, arguments, |it| {
            it.text().map(str::to_owned)
        })?;
        Ok(DomainCapabilities {
            emulates_tpms: emulates_tpms(&capabilities),
        })
    }
}

/// Reads the account in a document of libvirt's capabilities: the base label of its security model
/// `dac`, such as `+64055:+106`.
fn account(capabilities: &str) -> Option<(u32, u32)> {
    let document = Document::parse(capabilities).ok()?;
    let is_dac =
        |model: &Node<'_, '_>| child(*model, "model").is_some_and(|it| it.text() == Some("dac"));
    let mut models = document
        .descendants()
        .filter(|it| it.has_tag_name("secmodel"));
    let label = child(models.find(is_dac)?, "baselabel")?.text()?;
    let (user, group) = label.split_once(':')?;
    let number = |text: &str| text.trim_start_matches('+').parse().ok();
    Some((number(user)?, number(group)?))
}

/// Reads whether there are emulated TPMs in a document of libvirt's about domains.
fn emulates_tpms(capabilities: &str) -> Option<bool> {
    let document = Document::parse(capabilities).ok()?;
    let tpm = child(child(document.root_element(), "devices")?, "tpm")?;
    let values = tpm.descendants().filter(|it| it.has_tag_name("value"));
    let mut values = values.filter_map(|value| value.text());
    let is_supported = tpm.attribute("supported") == Some("yes");
    Some(is_supported && values.any(|value| value == "emulator"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_account_is_read_from_capabilities() {
        let text = "<capabilities><host><secmodel><model>apparmor</model><doi>0</doi></secmodel>\
                    <secmodel><model>dac</model><doi>0</doi>\
                    <baselabel type='kvm'>+64055:+106</baselabel>\
                    <baselabel type='qemu'>+64055:+106</baselabel></secmodel></host>\
                    </capabilities>";
        assert_eq!(account(text), Some((64055, 106)));
        assert_eq!(account("<capabilities/>"), None);
        assert_eq!(account("no XML"), None);
    }

    #[test]
    fn emulated_tpms_are_read_from_domain_capabilities() {
        let with = |tpm: &str| {
            format!("<domainCapabilities><devices>{tpm}</devices></domainCapabilities>")
        };
        let models = |value: &str| {
            with(&format!(
                "<tpm supported='yes'><enum name='backendModel'><value>passthrough</value>\
                 <value>{value}</value></enum></tpm>"
            ))
        };
        assert_eq!(emulates_tpms(&models("emulator")), Some(true));
        assert_eq!(emulates_tpms(&models("external")), Some(false));
        assert_eq!(emulates_tpms(&with("<tpm supported='no'/>")), Some(false));
        assert_eq!(emulates_tpms(&with("")), None);
    }
}
