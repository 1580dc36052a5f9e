//! Checks whether an emulator has the devices of a guest.

use super::{Emulator, Question, size, version};
use crate::hardware::tables;
use crate::memory::{KEPT_BLOCK_BYTES_MAX, is_findable};
use crate::tested;
use longhaul_protocol::machine::RamBlock;
use longhaul_protocol::message::Check;
use std::collections::BTreeSet;

/// The first version of QEMU that says where all of its RAM blocks are.
const LISTS_ADDRESSES: [u32; 2] = [8, 0];

impl Question<'_> {
    /// Checks that an emulator has every device of the guest, and says where its memory is.
    pub(super) fn devices(&self, emulator: &Emulator, checks: &mut Vec<Check>) {
        let Some(hardware) = &self.guest.hardware else {
            return;
        };
        let models = hardware.devices.iter().map(|device| device.model.as_str());
        let screen = tables::VGAS.iter();
        let screen = screen.filter(|(_, name)| hardware.vga.as_deref() == Some(*name));
        let models = models.chain(screen.map(|(model, _)| *model));
        let large = |(name, block): &(&String, &RamBlock)| {
            name.contains(':') && !is_findable(name) && block.max_bytes > KEPT_BLOCK_BYTES_MAX
        };
        let blocks = self.machine.map(|machine| machine.ram_blocks.iter());
        if version(&emulator.version) < LISTS_ADDRESSES.to_vec()
            && let Some((name, block)) = blocks.and_then(|mut blocks| blocks.find(large))
        {
            checks.push(self.refuse(
                format!(
                    "its QEMU {} does not say where video memory of {} is (RAM block {name})",
                    emulator.version,
                    size(block.max_bytes)
                ),
                format!(
                    "move it to a host with QEMU 8.0 or newer, or start it with at most {} of \
                     video memory, or with its screen on the first PCI bus",
                    size(KEPT_BLOCK_BYTES_MAX)
                ),
            ));
        }
        let models: BTreeSet<&str> = models.collect();
        for model in &models {
            if let Some((why, hint)) = tested::stays(model, &emulator.version) {
                checks.push(self.refuse(format!("device {model}: {why}"), hint.to_owned()));
            }
        }
        let absent: BTreeSet<&str> = models
            .into_iter()
            .filter(|model| emulator.absent_models.contains(*model))
            .collect();
        for model in absent {
            let hint = match model {
                "qxl" | "qxl-vga" => format!(
                    "install QEMU's modules for SPICE on {} (Debian: qemu-system-modules-spice)",
                    self.host
                ),
                _ => format!(
                    "install a QEMU that has {model} on {}, or the module that it is in",
                    self.host
                ),
            };
            checks.push(self.refuse(
                format!(
                    "its QEMU {} does not have the device {model}",
                    emulator.version
                ),
                hint,
            ));
        }
    }
}
