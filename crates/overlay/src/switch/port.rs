//! The ports of a switch: those of this host, and one for each other host of the network.

use crate::bucket::{Bucket, Rate};
use longhaul_protocol::HostId;

/// Names a port of one switch. A name is not used again soon after its port is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId {
    pub(super) slot: u16,
    pub(super) generation: u16,
}

/// What is behind a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    /// A device of this host: a guest, or a bridge with many.
    Local,
    /// Another host of the network.
    Host(HostId),
    /// The gateway of the network on this host.
    Gateway,
}

/// The limits of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortConfig {
    /// Whether frames with a source other than the MAC addresses pinned to the port are dropped.
    pub only_own_mac: bool,
    /// Most MAC addresses, in all VLANs together, that are learned at the port.
    pub macs_max: u32,
    /// Limit of frames to all stations or to unknown addresses.
    pub flood: Rate,
    /// Limit of frames to other groups.
    pub multicast: Rate,
}

impl PortConfig {
    /// The limits of a port of this host.
    pub const LOCAL: Self = Self {
        only_own_mac: false,
        macs_max: 1024,
        flood: Rate {
            per_second: 1000,
            burst: 2000,
        },
        multicast: Rate {
            per_second: 50_000,
            burst: 10_000,
        },
    };
    /// The limits of a port to another host, behind which there are many guests.
    pub const HOST: Self = Self {
        only_own_mac: false,
        macs_max: 8192,
        flood: Rate {
            per_second: 10_000,
            burst: 20_000,
        },
        multicast: Rate {
            per_second: 200_000,
            burst: 40_000,
        },
    };
}

/// Limit of redirects to one host.
const REDIRECTS: Rate = Rate {
    per_second: 100,
    burst: 100,
};
/// Limit of announcements from one host.
const ANNOUNCEMENTS: Rate = Rate {
    per_second: 100,
    burst: 1000,
};

/// What was reported of a port. Each is reported once.
#[derive(Debug, Default)]
pub(super) struct Reported {
    pub(super) flood: bool,
    pub(super) spoofed: bool,
    pub(super) full: bool,
}

#[derive(Debug)]
pub(super) struct Port {
    pub(super) behind: Behind,
    pub(super) config: PortConfig,
    /// MAC addresses that are learned here.
    pub(super) macs: u32,
    pub(super) flood: Bucket,
    pub(super) multicast: Bucket,
    pub(super) redirects: Bucket,
    pub(super) announcements: Bucket,
    pub(super) reported: Reported,
}

impl Port {
    pub(super) fn is_local(&self) -> bool {
        self.behind == Behind::Local
    }

    /// Whether it is no port to another host.
    pub(super) fn is_here(&self) -> bool {
        !matches!(self.behind, Behind::Host(_))
    }
}

/// All ports, with lists of those that frames are replicated to.
#[derive(Debug, Default)]
pub(super) struct Ports {
    slots: Vec<(u16, Option<Port>)>,
    all: Vec<PortId>,
    local: Vec<PortId>,
}

impl Ports {
    pub(super) fn add(&mut self, behind: Behind, config: PortConfig) -> PortId {
        let port = Port {
            behind,
            config,
            macs: 0,
            flood: Bucket::new(config.flood),
            multicast: Bucket::new(config.multicast),
            redirects: Bucket::new(REDIRECTS),
            announcements: Bucket::new(ANNOUNCEMENTS),
            reported: Reported::default(),
        };
        let free = self.slots.iter().position(|(_, port)| port.is_none());
        let slot = free.unwrap_or(self.slots.len());
        if slot == self.slots.len() {
            self.slots.push((0, None));
        }
        let (generation, place) = &mut self.slots[slot];
        *generation = generation.wrapping_add(1);
        *place = Some(port);
        let id = PortId {
            slot: slot as u16,
            generation: *generation,
        };
        // A gateway gets no frames to groups.
        if behind != Behind::Gateway {
            self.all.push(id);
        }
        if behind == Behind::Local {
            self.local.push(id);
        }
        id
    }

    pub(super) fn remove(&mut self, id: PortId) -> Option<Port> {
        self.get(id)?;
        self.all.retain(|other| *other != id);
        self.local.retain(|other| *other != id);
        self.slots[usize::from(id.slot)].1.take()
    }

    #[inline]
    pub(super) fn get(&self, id: PortId) -> Option<&Port> {
        let (generation, port) = self.slots.get(usize::from(id.slot))?;
        port.as_ref().filter(|_| *generation == id.generation)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: PortId) -> Option<&mut Port> {
        let (generation, port) = self.slots.get_mut(usize::from(id.slot))?;
        port.as_mut().filter(|_| *generation == id.generation)
    }

    pub(super) fn of_host(&self, host: HostId) -> Option<PortId> {
        let is_it = |id: &&PortId| self.behind(**id) == Some(Behind::Host(host));
        self.all.iter().find(is_it).copied()
    }

    pub(super) fn behind(&self, id: PortId) -> Option<Behind> {
        Some(self.get(id)?.behind)
    }

    pub(super) fn all(&self) -> &[PortId] {
        &self.all
    }

    pub(super) fn local(&self) -> &[PortId] {
        &self.local
    }
}

/// The ports that a frame goes to: none, one, or all of a list except the one that it came from.
#[derive(Debug, Clone)]
pub struct Destinations<'a> {
    one: Option<PortId>,
    list: std::slice::Iter<'a, PortId>,
    except: Option<PortId>,
}

impl<'a> Destinations<'a> {
    pub(super) fn one(port: PortId) -> Self {
        Self {
            one: Some(port),
            ..Self::none()
        }
    }

    pub(super) fn many(list: &'a [PortId], except: PortId) -> Self {
        Self {
            one: None,
            list: list.iter(),
            except: Some(except),
        }
    }

    pub(super) fn none() -> Self {
        Self {
            one: None,
            list: [].iter(),
            except: None,
        }
    }
}

impl Iterator for Destinations<'_> {
    type Item = PortId;

    #[inline]
    fn next(&mut self) -> Option<PortId> {
        if let Some(port) = self.one.take() {
            return Some(port);
        }
        let except = self.except;
        self.list.find(|port| Some(**port) != except).copied()
    }
}
