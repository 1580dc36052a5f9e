//! UEFI firmware and TPMs. libvirt keeps their state in files of its own at each host; the content
//! travels with the guest's memory and devices.

use super::{DomainXml, Place, XmlError, attribute, child, refuse, same};
use longhaul_hypervisor::config::HostConfig;
use longhaul_hypervisor::firmware::SystemFirmware;
use std::path::Path;

/// The folder in which libvirt keeps variables of firmware.
pub(super) const VARIABLES: &str = "/var/lib/libvirt/qemu/nvram/";

impl<'a> DomainXml<'a> {
    /// Returns the name of the firmware's code; `None` where it is QEMU's own, or libvirt's choice.
    pub(super) fn firmware(&self, config: &HostConfig) -> Result<Option<String>, XmlError> {
        if let Some(variables) = self.at(&["os", "nvram"]) {
            let path = self.text_at(&["os", "nvram"]).unwrap_or_default();
            let is_file = variables
                .attribute("type")
                .is_none_or(|kind| kind == "file");
            if !is_file || !is_of_libvirt(path) {
                let place = if path.is_empty() { "elsewhere" } else { path };
                return refuse(
                    format!("the variables of its firmware are on {place}"),
                    format!("keep them in a file in {VARIABLES} (virsh edit, <nvram>)"),
                );
            }
        }
        let Some(code) = self
            .text_at(&["os", "loader"])
            .filter(|code| !code.is_empty())
        else {
            return Ok(None);
        };
        let named = || config.firmware.iter();
        let exactly = named().find(|(_, path)| path.as_path() == Path::new(code));
        let found = exactly.or_else(|| named().find(|(_, path)| same(code, path)));
        match found {
            Some((name, _)) => Ok(Some(name.clone())),
            None => refuse(
                format!("its firmware is {code}, which no name of the configuration is"),
                format!(
                    "add to the configuration of both hosts, each with its own path:\n\
                     [firmware]\nNAME = \"{code}\""
                ),
            ),
        }
    }

    /// Returns what its firmware has on its host, and what this host has in its place.
    pub(super) fn firmware_places<'b>(
        &self,
        code: &'b Path,
        system: &'b SystemFirmware,
    ) -> Vec<(Place<'_>, &'b Path)> {
        let loader = self.place_at(&["os", "loader"]).map(|place| (place, code));
        let template = self.at(&["os", "nvram"]);
        let template = template.and_then(|it| attribute(it, "template"));
        let template = template.zip(system.variables_of(code));
        let template = template.map(|(attribute, path)| {
            let place = Place {
                range: attribute.range_value(),
                path: attribute.value(),
            };
            (place, path)
        });
        loader.into_iter().chain(template).collect()
    }

    /// Refuses a TPM that is the host's, or whose state is not libvirt's alone.
    pub(super) fn refuse_tpm_of_host(&self) -> Result<(), XmlError> {
        for tpm in self.devices("tpm") {
            let backend = child(tpm, "backend");
            let kind = backend.and_then(|backend| backend.attribute("type"));
            if kind != Some("emulator") {
                return refuse(
                    format!("it has a TPM of type {:?}", kind.unwrap_or_default()),
                    "give it an emulated one (<backend type='emulator'/>), or detach it",
                );
            }
            if backend.is_some_and(|backend| child(backend, "encryption").is_some()) {
                return refuse(
                    "the state of its TPM is encrypted with a secret of this host",
                    "move it with virsh migrate, where both hosts have the secret",
                );
            }
        }
        Ok(())
    }
}

/// Returns whether a path is a file in libvirt's own folder for variables.
pub(super) fn is_of_libvirt(path: &str) -> bool {
    let name = path.strip_prefix(VARIABLES);
    name.is_some_and(|name| !name.is_empty() && !name.contains('/') && name != "..")
}
