//! Finds out whether the memory of a guest can follow it to this host (post-copy).

use super::{Prober, huge_pages};
use crate::guest::account;
use crate::probe;
use longhaul_protocol::guest::GuestDescription;

/// Returns whether a guest has memory of pages above 4 KiB, which cannot follow it.
pub fn has_huge_pages(guest: &GuestDescription) -> bool {
    !huge_pages::needed(guest).is_empty()
}

/// What lets QEMU run a guest before all of its memory has arrived.
pub const USERFAULTFD_HINT: &str = "let QEMU's user open /dev/userfaultfd (the package has a udev \
                                    rule for it; QEMU 8.1 or later), or set \
                                    vm.unprivileged_userfaultfd = 1";

/// Whose account a QEMU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QemuAccount {
    /// The one of the configuration.
    Configured,
    /// The agent's.
    Agent,
}

impl Prober {
    /// Returns why the QEMU of a machine type cannot run its guest before all of its memory has
    /// arrived; `None` if it can.
    pub async fn keeps_memory_from_following(
        &self,
        machine_type: &str,
        account: QemuAccount,
    ) -> Option<String> {
        let capabilities = match self.capabilities().await {
            Ok(capabilities) => capabilities,
            Err(error) => return Some(error.to_string()),
        };
        let label = capabilities.emulator_for(machine_type)?;
        let path = self.config.qemu.emulators.get(label)?;
        let run_as = self.config.qemu.run_as.as_deref();
        let run_as = run_as.filter(|_| account == QemuAccount::Configured);
        let account = match self::account(run_as) {
            Ok(account) => account,
            Err(error) => return Some(error.to_string()),
        };
        match probe::can_run_early(path, account.as_ref()).await {
            Ok(can) => can.err().map(|error| error.to_string()),
            Err(error) => Some(error.to_string()),
        }
    }
}
