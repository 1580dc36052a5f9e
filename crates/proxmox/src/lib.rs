//! Guests of Proxmox VE, by its own files and commands.
//!
//! Proxmox VE has one file for each guest, `/etc/pve/qemu-server/VMID.conf`, and builds QEMU's
//! command line from it. Longhaul never builds that command line: `qm start --stateuri` does, as in
//! a migration of Proxmox VE's own. The lock `migrate` in the file keeps its other commands away
//! from a guest that moves.
//!
//! | module | owns |
//! |---|---|
//! | [`config`] | the files of guests: lines, sections, locks |
//! | [`device`] | drives and cards in them |
//! | [`storage`] | `/etc/pve/storage.cfg`: where volumes are |
//! | [`accept`] | what is taken from the file of a guest that comes from another host |
//! | [`names`] | the names under which agents speak of volumes and bridges |
//! | [`node`] | this host: its files, its guests that run, its commands |
//! | [`relay`] | QMP over a control socket that is shared with Proxmox VE |
//! | [`manager`] | Proxmox VE as a manager of guests |

pub mod accept;
pub mod config;
pub mod device;
pub mod manager;
pub mod names;
pub mod node;
mod notes;
pub mod relay;
pub mod storage;
