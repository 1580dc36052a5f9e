//! The orders in which base images arrive.

use crate::host::lock::lock;
use longhaul_image::{Digest, ImageId, Order};
use longhaul_protocol::disk::Base;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

/// Returns the id of a base image.
pub(crate) fn id_of(base: &Base) -> ImageId {
    ImageId(Digest(base.image))
}

/// The orders in which base images arrive, each while a guest needs it. Guests that arrive at the
/// same time share the order of an image.
#[derive(Debug, Default)]
pub(crate) struct Orders(Mutex<HashMap<ImageId, Weak<Order>>>);

impl Orders {
    /// Adds the hot stripes of a base image to its order, and returns the order.
    pub(crate) fn with(&self, base: &Base) -> Arc<Order> {
        let mut orders = lock(&self.0);
        orders.retain(|_, order| order.strong_count() > 0);
        let known = orders.get(&id_of(base)).and_then(Weak::upgrade);
        let order = known.unwrap_or_default();
        orders.insert(id_of(base), Arc::downgrade(&order));
        let hot = base.hot.iter();
        order.add(hot.map(|hot| (hot.stripe, hot.pages.into())));
        order
    }
}
