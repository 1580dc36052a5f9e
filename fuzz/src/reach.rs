//! Fuzzes what another member of a realm says about its paths: signals, and the payloads of probes.

use longhaul_network::reach::probe::Probe;
use longhaul_network::reach::signal::{self, SIGNAL_BYTES_MAX};
use longhaul_paths::tuning::CANDIDATES_MAX;

pub(crate) fn run(data: &[u8]) {
    if let Ok(message) = signal::decode(data) {
        assert!(message.offer.candidates.len() <= CANDIDATES_MAX);
        let bytes = signal::encode(&message);
        assert!(bytes.len() <= SIGNAL_BYTES_MAX);
        assert_eq!(signal::decode(&bytes), Ok(message));
    }
    if let Ok(probe) = Probe::decode(data) {
        assert_eq!(Probe::decode(&probe.encode()), Ok(probe));
    }
}
