//! What the managers of guests beside Longhaul bring to a host's configuration.

use crate::config::{BridgePort, Image, Network};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

/// Proxmox VE on this host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProxmoxConfig {
    /// Whether its guests are guests of this host.
    pub enabled: bool,
    /// The storages of this host for arriving volumes, by the storages that have them at their
    /// source. A storage without an entry is the one of the same name.
    pub storages: BTreeMap<String, String>,
    /// The bridges of this host for the cards of arriving guests, by the bridges at their source.
    /// A bridge without an entry is the one of the same name.
    pub bridges: BTreeMap<String, String>,
}

impl Default for ProxmoxConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            storages: BTreeMap::new(),
            bridges: BTreeMap::new(),
        }
    }
}

/// Images and networks that the managers of guests know by themselves, such as the volumes of
/// Proxmox VE, by name. They come and go while the agent runs. Cheap to clone; all clones are one.
#[derive(Debug, Clone, Default)]
pub struct NamedByManagers(Arc<RwLock<Named>>);

/// What the managers of guests have named.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Named {
    images: BTreeMap<String, Image>,
    networks: BTreeMap<String, Network>,
}

impl NamedByManagers {
    /// Names an image, or gives the name to another one.
    pub fn set_image(&self, name: &str, image: Image) {
        let mut named = self.0.write().unwrap_or_else(PoisonError::into_inner);
        named.images.insert(name.to_owned(), image);
    }

    /// Names a bridge, or gives the name to another one.
    pub fn set_bridge(&self, name: &str, bridge: &str) {
        let network = Network::Bridge(BridgePort::of(bridge));
        let mut named = self.0.write().unwrap_or_else(PoisonError::into_inner);
        named.networks.insert(name.to_owned(), network);
    }

    /// Forgets the names of images.
    pub fn forget_images<'a>(&self, names: impl IntoIterator<Item = &'a String>) {
        let mut named = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for name in names {
            named.images.remove(name);
        }
    }

    /// Returns the images, by name.
    pub(crate) fn images(&self) -> BTreeMap<String, Image> {
        self.all().images
    }

    /// Returns the networks, by name.
    pub(crate) fn networks(&self) -> BTreeMap<String, Network> {
        self.all().networks
    }

    fn all(&self) -> Named {
        let named = self.0.read().unwrap_or_else(PoisonError::into_inner);
        named.clone()
    }
}

impl PartialEq for NamedByManagers {
    fn eq(&self, other: &Self) -> bool {
        self.all() == other.all()
    }
}

impl Eq for NamedByManagers {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HostConfig;

    #[test]
    fn names_of_managers_are_beside_those_of_the_document() {
        let text = "[qemu.emulators]\nq = \"/usr/bin/kvm\"\n\
                    [images.web]\npath = \"/srv/web\"\nformat = \"raw\"\n\
                    [networks]\nlan = { bridge = \"br0\" }\n\
                    [proxmox]\nstorages = { fast = \"tank\" }\n";
        let config: HostConfig = toml::from_str(text).unwrap();
        assert!(config.proxmox.enabled);
        assert_eq!(config.proxmox.storages["fast"], "tank");
        let image = |path: &str| Image {
            path: path.into(),
            ..config.image("web").unwrap()
        };
        config.named.set_image("other", image("/vz/other"));
        config.named.set_image("web", image("/vz/web"));
        config.named.set_bridge("dmz", "vmbr1");
        config.named.set_bridge("lan", "vmbr2");
        assert_eq!(config.image("other"), Some(image("/vz/other")));
        // The document comes first.
        assert_eq!(config.image("web"), Some(image("/srv/web")));
        assert_eq!(config.all_images().len(), 2);
        let networks = config.all_networks();
        assert_eq!(networks["lan"], Network::Bridge(BridgePort::of("br0")));
        assert_eq!(networks["dmz"], Network::Bridge(BridgePort::of("vmbr1")));
        config.named.forget_images([&"other".to_owned()]);
        assert_eq!(config.image("other"), None);
    }
}
