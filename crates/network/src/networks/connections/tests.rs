//! Tests which connection's keys are used when both hosts dial.

use super::super::wires::Frames;
use super::*;
use crate::member::{self, Options, Stored};
use crate::plane::{OpenedProbe, PlaneConfig, PlaneOutputs};
use longhaul_realm::key::SigningKey;
use longhaul_realm::member::Kept;
use longhaul_transport::{
    EndpointConfig, Hello, Identity, Scope, SocketId, TRUST_FILE, TrustStore, TrustedHost, Way,
};
use tokio::time::timeout;

/// Reached only when something is broken.
const LIMIT: Duration = Duration::from_secs(60);

struct Host {
    connections: Connections,
    outputs: PlaneOutputs,
    _folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(folder.path()).unwrap();
        let trust = TrustStore::open(&folder.path().join(TRUST_FILE)).unwrap();
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            software: "test".to_owned(),
            incarnation: None,
        };
        let config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), hello);
        let endpoint = Endpoint::bind(config, identity, trust).unwrap();
        let mut config = PlaneConfig::default();
        // What is sealed with other keys than the current ones is lost.
        config.session.previous_grace = Duration::ZERO;
        config.session.confirm_grace = Duration::ZERO;
        let own = endpoint.host_id();
        let (plane, inbox, outputs) = Plane::new(config, endpoint.plane_socket(), own).unwrap();
        endpoint.set_datagrams(Some(Box::new(Frames(inbox))));
        let realm = SigningKey::from_seed(&[1; 32]).unwrap().public().realm();
        let (member, _) = member::start(Options {
            endpoint: endpoint.clone(),
            folder: folder.path().to_owned(),
            stored: Stored {
                realm,
                servers: Vec::new(),
                kept: Kept::default(),
            },
            software: "test".to_owned(),
            events: None,
        })
        .unwrap();
        Self {
            connections: Connections::new(endpoint, Arc::new(plane), member),
            outputs,
            _folder: folder,
        }
    }

    fn endpoint(&self) -> &Endpoint {
        &self.connections.endpoint
    }

    fn trust(&self, name: &str, other: &Self) {
        let entry = TrustedHost {
            name: name.to_owned(),
            id: other.endpoint().host_id(),
            addresses: vec![other.endpoint().local_address().unwrap().to_string()],
            scope: Scope {
                may_query: true,
                may_send_guests: true,
            },
        };
        self.endpoint().trust().add(entry).unwrap();
    }

    /// Takes the keys of a connection as the driver does.
    fn take(&self, control: &Control) {
        if let Err(error) = self.connections.take_keys(control, Suite::Aes256Gcm) {
            control.close(CloseCode::Done, &error.to_string());
        }
    }

    /// Sends a probe, which has to arrive at the other host.
    async fn reaches(&self, other: &mut Self) {
        let way = Way::Direct {
            socket: SocketId::MAIN,
            address: other.endpoint().local_address().unwrap(),
        };
        let (plane, to) = (&self.connections.plane, other.endpoint().host_id());
        let arrives = async {
            loop {
                plane.seal_probe(to, way, b"probe").unwrap();
                // A datagram may be lost.
                let next = timeout(Duration::from_secs(1), other.outputs.probes.recv());
                if let Ok(probe) = next.await {
                    return probe.unwrap();
                }
            }
        };
        let OpenedProbe { peer, payload, .. } = timeout(LIMIT, arrives).await.unwrap();
        assert_eq!(peer, self.endpoint().host_id());
        assert_eq!(payload, b"probe");
    }
}

/// Returns both ends of a connection.
async fn dial(from: &Host, to: &Host) -> (Control, Control) {
    let (dialled, accepted) =
        tokio::join!(from.endpoint().connect("other"), to.endpoint().accept());
    (dialled.unwrap(), accepted.unwrap())
}

#[tokio::test]
async fn hosts_that_dial_each_other_use_the_same_keys() {
    for order in 0..4 {
        let (mut low, mut high) = (Host::new(), Host::new());
        if low.endpoint().host_id() > high.endpoint().host_id() {
            std::mem::swap(&mut low, &mut high);
        }
        low.trust("other", &high);
        high.trust("other", &low);
        let (kept, kept_there) = dial(&low, &high).await;
        let (other_there, other) = dial(&high, &low).await;
        for (host, first, second, swapped) in [
            (&low, &kept, &other, order & 1 == 1),
            (&high, &kept_there, &other_there, order & 2 == 2),
        ] {
            let (first, second) = if swapped {
                (second, first)
            } else {
                (first, second)
            };
            host.take(first);
            host.take(second);
        }
        for end in [&other, &other_there] {
            timeout(LIMIT, end.closed()).await.unwrap();
        }
        assert!(!kept.has_ended() && !kept_there.has_ended(), "{order}");
        low.reaches(&mut high).await;
        high.reaches(&mut low).await;
    }
}

#[tokio::test]
async fn a_later_connection_of_the_same_host_replaces_the_earlier_one() {
    let (mut one, mut two) = (Host::new(), Host::new());
    one.trust("other", &two);
    two.trust("other", &one);
    let (first, first_there) = dial(&one, &two).await;
    one.take(&first);
    two.take(&first_there);
    let (second, second_there) = dial(&one, &two).await;
    one.take(&second);
    two.take(&second_there);
    timeout(LIMIT, first.closed()).await.unwrap();
    timeout(LIMIT, first_there.closed()).await.unwrap();
    assert!(!second.has_ended() && !second_there.has_ended());
    one.reaches(&mut two).await;
    two.reaches(&mut one).await;
}
